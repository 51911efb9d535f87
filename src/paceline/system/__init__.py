"""What every component needs of the operating system: durable files, processes, addresses."""
