"""What is measured, logged and traced of requests and of the fleet."""
