# A larger model: 5.7M parameters, 40 MB, half an hour to three quarters on two cores. In this shape
# learned tokens are ahead of whitespace's and of plain bytes, and by little of H-Net's. Plain bytes
# in the quick run's shape are ahead of them all (experiments/results/large/README.md).
#   python train.py config/laptop.py --data=data/mine --out_dir=out-laptop
seq_len = 1024
embedding_dim = 256
num_heads = 4
effective_batch_size = 8
batch_size = 8
training_bytes = 40_000_000
warmup_bytes = 400_000
policy_start_bytes = 1_000_000
eval_interval = 500
