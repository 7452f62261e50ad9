"""The wire formats: each module decodes the requests of some endpoints, and encodes their responses."""
