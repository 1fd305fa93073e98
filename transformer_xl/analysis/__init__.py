"""Questions put to a trained model: how far back it looks, what memory is worth, where its heads attend."""
