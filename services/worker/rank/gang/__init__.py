"""How the ranks of an attempt meet, agree and part."""
