# The paper's 90M model on Python code (Table 2, middle). Data, then training:
#   python prepare.py --dataset=codeparrot --max_bytes=3.5e9
#   torchrun --standalone --nproc_per_node=8 train.py config/codeparrot_90m.py
from config.fineweb_147m import *  # all that the paper's models have in common

data = "data/codeparrot"
out_dir = "out-codeparrot-90m"
n_mid_layers = 6
learning_rate = 2e-3
warmup_bytes = 250_000_000
training_bytes = 3_400_000_000
