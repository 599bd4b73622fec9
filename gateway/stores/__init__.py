"""Stores of responses and streams that clients may request again."""
