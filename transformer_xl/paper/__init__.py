"""The paper, table by table: its figures, the models that make them, and what they are here."""
