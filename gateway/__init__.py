"""HTTP side of Pelton: authentication, admission, text processing and streaming."""
