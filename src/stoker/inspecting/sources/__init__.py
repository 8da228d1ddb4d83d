"""What a path holds, as samples that can be read one by one."""
