"""The gated activation of a feed-forward layer, on CPU and GPU."""
