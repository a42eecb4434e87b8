"""Everything on one machine: an embedded Redis, a controller and one agent under one owner."""
