# A larger model: 5.7M parameters, 40 MB, about an hour on two cores (at 12 kB/s, measured with a
# constant target; a dense start takes longer). The learning rates and the weight decay are the
# quick run's, not tuned at this size.
#   python train.py config/laptop.py --data=data/mine --out_dir=out-laptop
seq_len = 1024
embedding_dim = 256
num_heads = 4
effective_batch_size = 8
batch_size = 8
pruning_bytes = 20_000_000  # with 3.2M parameters and 9 MB, half of the run gained 0.15 bits
lambda_target = 0.05  # holds the rate at a target that moves
training_bytes = 40_000_000
warmup_bytes = 400_000
eval_interval = 250
