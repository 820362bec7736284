#!/usr/bin/env bash
# Every measurement of RESULTS.md on one GPU, in stages of a few minutes each:
#
#   benchmarks/suite.sh OUT tests exactness engine quantized mixtures adapters profile kernels soak start serving
#   benchmarks/suite.sh OUT tp replicas draft        # on several GPUs
#   python -m benchmarks.library.report OUT/*.jsonl
#   python -m benchmarks.library.history --slower 0.03   # what became slower, once lines are in benchmarks/results
#
# The stages up to `start` need torch and Triton; `serving`, `replicas` and `draft` an installed Callboard. MODELS narrows
# the models, RATES names the conversations a second that replicas get.
# With WORKERS=20 as many tests run side by side, on all GPUs (pytest-xdist).
# OUT gets JSON lines, one file a benchmark, and logs; a stage that fails does not stop the next.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1; shift
mkdir -p "$out"
models=${MODELS:-llama-3.2-1b llama-3.2-3b llama-3.1-8b qwen3-4b}
folders=${FOLDERS:-/tmp/callboard-models}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

bench() { # module, arguments
    local module=$1 name=${1##*.}; shift
    echo "==> $name $* ($SECONDS s)"
    python -m "benchmarks.$module" "$@" --out "$out/$name.jsonl" >>"$out/$name.out" 2>>"$out/$name.log" ||
        { echo "failed:"; tail -3 "$out/$name.log"; }
}

folder() { # of random weights, made once
    [ -f "$folders/$1/config.json" ] || python -m benchmarks.library.make_random_model "$1" "$folders/$1" 2>>"$out/folder.log"
}

for stage in "$@"; do
    case $stage in
    tests) # every result has its line in the log, even if time ends before the tests do
        python -m pytest -v -m gpu -p no:cacheprovider ${WORKERS:+-n "$WORKERS" --dist load} tests/gpu >"$out/tests.log" 2>&1
        grep -E "FAILED|ERROR" "$out/tests.log" | tee "$out/tests.txt"
        tail -1 "$out/tests.log" | tee -a "$out/tests.txt"
        ;;
    exactness) for model in $models; do bench engine.agreement --model "$model"; done ;;
    engine)
        for model in $models; do
            cells="1x128x512"
            case $model in
            *1b) cells+=" 8x128x256 32x128x256 64x128x256 128x128x256 256x128x256 256x512x128" ;;
            *3b) cells+=" 8x128x256 64x128x256 256x128x256" ;;
            *8b) cells+=" 8x128x256 32x128x256 64x128x256 128x128x256 256x128x256 256x512x128" ;;
            esac
            bench engine.decode --model "$model" --repeats 3 --cells $cells
            [ "$model" = qwen3-4b ] || bench engine.prefill --model "$model"
        done
        bench engine.decode --model llama-3.2-1b --repeats 3 --cells 64x128x256 --set deterministic=true
        bench engine.decode --model llama-3.2-3b --repeats 2 --cells 1x128x256 48x128x256 \
            --sampling temperature=0 temperature=0.8 temperature=0.8,top_p=0.9 temperature=0.7,top_k=20,top_p=0.95
        ;;
    quantized)
        for model in llama-3.1-8b llama-3.2-1b; do
            for form in fp8 int8 int4; do
                bench engine.decode --model $model --repeats 3 --cells 1x128x512 8x128x256 64x128x256 256x128x256 \
                    --set quantization=$form
                bench engine.prefill --model $model --set quantization=$form
            done
        done
        for form in none fp8 int4; do
            folder llama-3.1-8b && bench engine.start --folder "$folders/llama-3.1-8b" --set quantization=$form
        done
        ;;
    mixtures)
        for form in none fp8 int4; do
            bench engine.decode --model qwen3-30b-a3b --repeats 2 --cells 1x128x256 64x128x256 --set quantization=$form
        done
        ;;
    adapters)
        bench engine.adapters --model llama-3.2-1b --cells 1x128x512 8x128x256 64x128x256 --adapters 0 1 8
        bench engine.adapters --model llama-3.1-8b --cells --loads 10 --streams 64
        ;;
    profile) for batch in 1 256; do bench engine.profile_step --model llama-3.2-1b --batch $batch --trace "$out/trace-$batch.json.gz"; done ;;
    kernels) for model in $models; do bench kernels --model "$model"; done ;;
    tp) # several GPUs
        for gpus in 2 4 8; do
            [ "$gpus" -gt "$(nvidia-smi -L | wc -l)" ] || bench kernels.ranks --gpus $gpus --nccl
        done
        bench kernels.ranks --gpus 2 --masked --sizes 8192
        for gpus in 1 2 4 8; do
            [ "$gpus" -gt "$(nvidia-smi -L | wc -l)" ] && continue
            bench engine.decode --model llama-3.1-8b --repeats 3 --cells 1x128x512 64x128x256 --set tensor_parallel_size=$gpus
            bench engine.decode --model llama-3.1-8b --repeats 3 --cells 1x128x512 --set tensor_parallel_size=$gpus rank_invariant=true
            [ "$gpus" = 1 ] ||
                bench engine.decode --model llama-3.1-70b --repeats 2 --cells 1x128x256 64x128x256 --set tensor_parallel_size=$gpus
        done
        ;;
    replicas) # one engine a GPU behind one endpoint
        folder llama-3.1-8b && bench serving.replicas --serve "$folders/llama-3.1-8b" --label llama-3.1-8b \
            --replicas "$(nvidia-smi -L | wc -l)" --rates ${RATES:-8 11 14 17 20} --seconds 60
        ;;
    draft) # of about the 1B's shape, on the target's GPU and on its own
        pair=$folders/pair-1b
        [ -d "$pair/draft" ] || bench drafts.calibrated_pair "$pair" --draft 1b --acceptance 0.8
        for device in shared own; do
            bench drafts.speculation "$pair/target" --drafts none "$pair/draft" --batches 1 8 64 --set draft_device=$device
        done
        ;;
    soak) bench engine.soak --model llama-3.2-1b --minutes "${MINUTES:-10}" ;;
    start) folder llama-3.1-8b && for run in 1 2; do bench engine.start --folder "$folders/llama-3.1-8b"; done ;;
    serving)
        folder llama-3.2-3b && bench serving --serve "$folders/llama-3.2-3b" --label llama-3.2-3b
        folder llama-3.2-1b && bench serving --serve "$folders/llama-3.2-1b" --label llama-3.2-1b --workloads burst256 burst1024
        ;;
    *) echo "no stage is called $stage" >&2; exit 2 ;;
    esac
done
