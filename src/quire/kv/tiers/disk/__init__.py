"""The KV tier on disk, and files of one prompt's KV."""
