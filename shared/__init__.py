"""Definitions that gateway and worker share: settings, messages, sampling parameters, errors, logging, supervisor."""
