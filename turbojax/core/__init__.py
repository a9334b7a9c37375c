"""The pure side: state, forward, sampling and steps as functions of explicit values."""
