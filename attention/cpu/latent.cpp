// Absorbed latent attention, one query of one head after the other, as attention/latent.py defines it.
//
// A query reads its request's latents and rope keys in the order of their positions. What it computes depends on these
// alone: its bits are the same in any batch, on any number of threads, and in a prompt as in a decode.

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace {

inline float sum_of(Vec v) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += v[lane];
    return sum;
}

inline float product(const float* a, const float* b, long width) {
    Vec sums = {};
    for (long i = 0; i < width; i += LANES)
        sums += widen_some<FLOAT32>(a + i, width - i) * widen_some<FLOAT32>(b + i, width - i);
    return sum_of(sums);
}

// Turn scores [n] to e^score over that of the best one; returns their sum.
float weighed(float* scores, long count) {
    const float top = *std::max_element(scores, scores + count);
    Vec sums = {};
    for (long i = 0; i < count; i += LANES) {
        narrow_some<FLOAT32>(scores + i, exponential(widen_some<FLOAT32>(scores + i, count - i) - top), count - i);
        sums += widen_some<FLOAT32>(scores + i, count - i);
    }
    return sum_of(sums);
}

}  // namespace

extern "C" {

// Queries [T, H, L + R] at the positions from `start` on read latents [n, L] and rope keys [n, R] up to their own, and
// write weighted sums of the latents [T, H, L]; all are float32. `all_scores` [num_threads, start + T] is room for scores.
void attend(const float* query, const float* latents, const float* rope_keys, float* output, float* all_scores,
            long rows, long heads, long rank, long rope, long start, float scale, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(dynamic, 1)
    for (long place = 0; place < rows * heads; place++) {
        float* scores = all_scores + (start + rows) * omp_get_thread_num();
        const float* own = query + place * (rank + rope);
        const long count = start + place / heads + 1;
        for (long n = 0; n < count; n++)
            scores[n] =
                scale * (product(own, latents + n * rank, rank) + product(own + rank, rope_keys + n * rope, rope));
        const float sum = weighed(scores, count);
        float* to = output + place * rank;
        for (long i = 0; i < rank; i += LANES) {
            Vec read = {};
            for (long n = 0; n < count; n++)
                read += scores[n] * widen_some<FLOAT32>(latents + n * rank + i, rank - i);
            narrow_some<FLOAT32>(to + i, read / sum, rank - i);
        }
    }
}
}
