"""What an agent does in storage: the commit chain, exports, and rounds that remove what nobody needs."""
