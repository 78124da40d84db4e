# The paper's 147M model on text (Table 2, left). Data, then training:
#   python prepare.py --dataset=fineweb --max_bytes=6.2e9
#   torchrun --standalone --nproc_per_node=8 train.py config/fineweb_147m.py
# On two nodes of eight GPUs that share a disk, on both:
#   torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
#       train.py config/fineweb_147m.py --batch_size=8
data = "data/fineweb"
out_dir = "out-fineweb-147m"
seq_len = 4096
embedding_dim = 768
num_heads = 12
n_down_layers = 4
n_mid_layers = 12
n_up_layers = 4
attention_window = 64
downsample_rate_target = 1 / 5
policy_window = 8
policy_scale = 16.0
weight_decay = 0.01  # ours: the paper gives none, and no policy_softcap or grad_clip
gamma = 0.99
lambda_pi = 1e-2
lambda_target = 1e-2
lambda_early = 1e-1
learning_rate = 1.5e-3
cosine = True
muon_learning_rate = 0.0  # AdamW trains all, as in the paper
effective_batch_size = 128
batch_size = 16  # 34 GB; eq. 17 averages over all 128 rows on 8 GPUs
warmup_bytes = 450_000_000
training_bytes = 6_000_000_000
log_interval = 10
eval_interval = 1000
