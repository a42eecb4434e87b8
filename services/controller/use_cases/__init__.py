"""What people, agents and the clock can make the controller do."""
