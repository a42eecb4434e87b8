"""How ranks come to be: what they may have, the template and the warm process, the launch, the pipe."""
