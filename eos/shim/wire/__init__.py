"""Read and write the Kafka protocol as bytes: frames, headers, fields. Pure: no socket, no clock."""
