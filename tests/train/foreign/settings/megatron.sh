#!/bin/bash
# Runs a model
GPUS_PER_NODE=8
CHECKPOINT_PATH=$1
VOCAB_FILE=/x/vocab.json
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 1
)
GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
    --vocab-size 128256
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 500000
    --weight-decay 0.1 --adam-beta2 0.95
    --clip-grad 1.0 --bf16
    --lr 3.0e-4 --lr-decay-style cosine --min-lr 3.0e-5
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
    --hidden-dropout 0 --attention-dropout 0
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \
   --tensor-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer \
   --data-path 0.3 /c/a_text_document 0.7 /c/b_text_document --split 949,50,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model /tok --fancy-new-thing 3 \
   --save-interval 1000 --save $CHECKPOINT_PATH
