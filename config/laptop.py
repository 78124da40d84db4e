# A larger model: 5.7M parameters, 40 MB, about an hour on two cores (at 12 kB/s). The learning rates
# and the weight decay are the quick run's, not tuned at this size.
#   python train.py config/laptop.py --data=data/mine --out_dir=out-laptop
seq_len = 1024
embedding_dim = 256
num_heads = 4
effective_batch_size = 8
batch_size = 8
training_bytes = 40_000_000
warmup_bytes = 400_000
eval_interval = 250
