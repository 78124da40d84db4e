# Tiny Shakespeare, 1.1 MB, to compare with nanoGPT and char-rnn. A few minutes on two cores.
# experiments/README.md says how to get the data.
data = "data/shakespeare"
out_dir = "out-shakespeare"
