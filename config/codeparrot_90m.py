# The paper's 90M model on Python code (Table 2, middle). Data:
#   python prepare.py --dataset=codeparrot --max_bytes=3.5e9
#   torchrun --standalone --nproc_per_node=8 train.py config/codeparrot_90m.py
data = "data/codeparrot"
out_dir = "out-codeparrot-90m"
seq_len = 4096
embedding_dim = 768
num_heads = 12
n_down_layers = 4
n_mid_layers = 6
n_up_layers = 4
attention_window = 64
downsample_rate_target = 1 / 5
policy_window = 8
policy_scale = 16.0
policy_start_bytes = 0
gamma = 0.99
lambda_pi = 1e-2
lambda_target = 1e-2
lambda_early = 1e-1
learning_rate = 2e-3
effective_batch_size = 128
batch_size = 16
warmup_bytes = 250_000_000
training_bytes = 3_400_000_000
log_interval = 10
