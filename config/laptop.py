# A larger model: 5.8M parameters, 40 MB of text, 2 GB of memory. On two cores it takes about an
# hour with AVX512-BF16 (12 kB/s) and two without (5.8 kB/s). The learning rates and the weight
# decay are the quick run's, not tuned at this size.
#   python train.py config/laptop.py --data=data/mine --out_dir=out-laptop
seq_len = 1024
embedding_dim = 256
num_heads = 4
effective_batch_size = 8
batch_size = 8
training_bytes = 40_000_000
warmup_bytes = 400_000
eval_interval = 250
gamma = 0.99
