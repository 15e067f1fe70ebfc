"""Values, keys and headers <-> bytes: of outputs, of dead letters, of lineage. Knows no App and no Kafka client."""
