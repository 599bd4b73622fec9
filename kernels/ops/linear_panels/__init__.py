"""CPU matrix products over weights that are packed into panels."""
