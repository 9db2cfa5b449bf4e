"""Which blocks each query reads: importance scores and the top n."""
