"""Division of a step's attention into work items of about equal cost."""
