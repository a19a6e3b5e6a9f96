"""Images of prompts: reading them, and their pixels as a policy's vision tower takes them."""
