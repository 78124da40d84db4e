# The paper's 20-40M models on text (Table 2, right): n token layers and one token in n bytes, at
# about equal FLOPs. This is n = 4. For n = 2 add
#   --n_mid_layers=2 --downsample_rate_target=1/2 --out_dir=out-aspect-ratio-2
# and for n = 6 the same flags with 6 in place of 2. Data, then training:
#   python prepare.py --dataset=fineweb --max_bytes=6.2e9
#   torchrun --standalone --nproc_per_node=4 train.py config/aspect_ratio.py
from config.fineweb_147m import *  # all that the paper's models have in common

out_dir = "out-aspect-ratio"
embedding_dim = 512
num_heads = 8
n_mid_layers = 4
downsample_rate_target = 1 / 4
learning_rate = 3e-3
effective_batch_size = 64
warmup_bytes = 110_000_000
training_bytes = 1_500_000_000
