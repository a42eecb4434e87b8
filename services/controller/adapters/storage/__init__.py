"""What the controller reads of the storage that nodes write."""
