# Tiny Shakespeare, 1.1 MB, to compare with nanoGPT and char-rnn. About 4 minutes on two cores.
# curl -O https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
# python prepare.py --dataset=files --input input.txt --val_fraction=0.1 --seq_len=256 \
#     --out_dir=data/shakespeare
# python train.py config/shakespeare.py
data = "data/shakespeare"
out_dir = "out-shakespeare"
