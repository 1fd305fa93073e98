"""A server: completions over HTTP in the form of OpenAI's API, with texts that are continued from their memory."""
