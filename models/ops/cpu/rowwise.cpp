// Operators that compute each row, or each number, by itself: norms, rotary, gates, a router's scores, the greedy choice
// and draws.
//
// A row's result depends neither on other rows nor on threads, nor a number's on its place: the numbers behind the last
// whole vector are computed in a vector too, whose rest is not stored. Numbers are stored in float32, bfloat16 or
// float16, computed in float32 and rounded where plain torch rounds last.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "operators.h"
#include "vectors.h"

namespace {

constexpr long SMALL = 1 << 15;  // one thread is as fast as several for fewer numbers

// As precise as numbers of the kind are.
template <Kind KIND>
inline Vec sigmoid(Vec x) {
    return KIND == BFLOAT16 ? rough_sigmoid(x) : 1.0f / (1.0f + exponential(-x));
}

// y = norm(x) * weight, or of the sum of x and `residual`, which is then written to `total`.
template <Kind KIND>
void normed(const void* x_, const void* residual_, const void* weight_, void* y_, void* total_, long rows, long width,
            float eps, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item *x = static_cast<const Item*>(x_), *residual = static_cast<const Item*>(residual_);
    const Item* weight = static_cast<const Item*>(weight_);
    Item *y = static_cast<Item*>(y_), *total = static_cast<Item*>(total_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * width > SMALL)
    for (long r = 0; r < rows; r++) {
        const Item* own = residual ? total + r * width : x + r * width;
        Vec squares = {};
        for (long i = 0; i < width; i += LANES) {
            Vec each = widen_some<KIND>(x + r * width + i, width - i);
            if (residual) {
                each = Stored<KIND>::through(each + widen_some<KIND>(residual + r * width + i, width - i));
                narrow_some<KIND>(total + r * width + i, each, width - i);
            }
            squares += each * each;
        }
        const float scale = 1.0f / std::sqrt(total_of(squares) / width + eps);
        for (long i = 0; i < width; i += LANES) {
            // The norm is rounded before it is weighed
            const Vec norm = Stored<KIND>::through(widen_some<KIND>(own + i, width - i) * scale);
            narrow_some<KIND>(y + r * width + i, widen_some<KIND>(weight + i, width - i) * norm, width - i);
        }
    }
}

// x [T, H, D] with strides of rows and heads is turned by cos and sin [T, D], whose halves are equal, to y [T, H, D].
template <Kind KIND>
void turned(const void* x_, const void* cos_, const void* sin_, void* y_, long rows, long heads, long dim,
            long row_stride, long head_stride, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item *x = static_cast<const Item*>(x_), *cos = static_cast<const Item*>(cos_);
    const Item* sin = static_cast<const Item*>(sin_);
    Item* y = static_cast<Item*>(y_);
    const long half = dim / 2;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * heads * dim > SMALL)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const Item* from = x + r * row_stride + h * head_stride;
            Item* to = y + (r * heads + h) * dim;
            for (long i = 0; i < half; i += LANES) {
                const long left = half - i;
                const Vec c = widen_some<KIND>(cos + r * dim + i, left), s = widen_some<KIND>(sin + r * dim + i, left);
                const Vec first = widen_some<KIND>(from + i, left), second = widen_some<KIND>(from + half + i, left);
                narrow_some<KIND>(to + i, first * c - second * s, left);
                narrow_some<KIND>(to + half + i, second * c + first * s, left);
            }
        }
}

// The logarithm of 1 + e^x. That of 1 + u, for u up to 1, is 2 artanh(u / (2 + u)), a series in at most 1 / 9.
inline Vec softplus(Vec x) {
    const Vec part = exponential(x > 0.0f ? -x : x), ratio = part / (2.0f + part), square = ratio * ratio;
    Vec sum = Vec{} + 1.0f / 17.0f;
    for (int odd = 15; odd > 0; odd -= 2) sum = sum * square + 1.0f / odd;
    return (x > 0.0f ? x : Vec{}) + 2.0f * ratio * sum;
}

enum Curve { SIGMOID, SOFTPLUS };

template <Kind KIND>
void curved(Curve curve, const void* x_, void* y_, long count, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item* x = static_cast<const Item*>(x_);
    Item* y = static_cast<Item*>(y_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && count > SMALL)
    for (long i = 0; i < count; i += LANES) {
        const Vec each = widen_some<KIND>(x + i, count - i);
        narrow_some<KIND>(y + i, curve == SIGMOID ? sigmoid<KIND>(each) : softplus(each), count - i);
    }
}

// y [T, O] = x [T, I] weight [O, I], whose products are summed in one order, plus the bias [O] in float32.
template <Kind KIND>
void scored(const void* x_, const void* weight_, const float* bias, void* y_, long rows, long width, long outputs,
            int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item *x = static_cast<const Item*>(x_), *weight = static_cast<const Item*>(weight_);
    Item* y = static_cast<Item*>(y_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * width * outputs > SMALL)
    for (long place = 0; place < rows * outputs; place++) {
        const Item *own = x + place / outputs * width, *by = weight + place % outputs * width;
        Vec products = {};
        for (long i = 0; i < width; i += LANES)
            products += widen_some<KIND>(own + i, width - i) * widen_some<KIND>(by + i, width - i);
        narrow_some<KIND>(y + place, Vec{} + total_of(products) + (bias ? bias[place % outputs] : 0.0f), 1);
    }
}

// The softmax of rows [T, W] in float32: the shares of e^x in the sum of its row.
void shared_out(const float* x, float* y, long rows, long width) {
    for (long r = 0; r < rows; r++, x += width, y += width) {
        float top = x[0];
        for (long i = 1; i < width; i++) top = x[i] > top ? x[i] : top;
        for (long i = 0; i < width; i += LANES)
            narrow_some<FLOAT32>(y + i, exponential(widen_some<FLOAT32>(x + i, width - i) - top), width - i);
        Vec sums = {};
        for (long i = 0; i < width; i += LANES) sums += widen_some<FLOAT32>(y + i, width - i);
        const float sum = total_of(sums);
        for (long i = 0; i < width; i++) y[i] /= sum;
    }
}

enum Gate { SILU, GELU, CLAMPED };

template <Kind KIND>
inline Vec opened(Gate gate, Vec x, Vec up, float slope, float limit) {
    if (gate == SILU) return x * sigmoid<KIND>(x) * up;
    // (1 + tanh(y)) / 2 is the sigmoid of 2 y
    if (gate == GELU) return x * sigmoid<KIND>(1.5957691216f * (x + 0.044715f * x * x * x)) * up;
    const Vec most = Vec{} + limit, least = Vec{} - limit;
    x = x > most ? most : x;
    up = up > most ? most : up < least ? least : up;
    return (up + 1.0f) * (x * sigmoid<KIND>(slope * x));
}

template <Kind KIND>
void gated(Gate gate, const void* x_, void* y_, long rows, long width, float slope, float limit, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item* x = static_cast<const Item*>(x_);
    Item* y = static_cast<Item*>(y_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * width > SMALL)
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < width; i += LANES) {
            const Vec shut = widen_some<KIND>(x + 2 * r * width + i, width - i);
            const Vec up = widen_some<KIND>(x + (2 * r + 1) * width + i, width - i);
            narrow_some<KIND>(y + r * width + i, opened<KIND>(gate, shut, up, slope, limit), width - i);
        }
}

// y = norm(x) * weight * opened(gate) of x [T, H, W], rounded once; tokens of the gate have a stride of their own.
template <Kind KIND>
void gated_normed(const void* x_, const void* gate_, const void* weight_, void* y_, long tokens, long heads, long width,
                  long gate_stride, float eps, bool is_silu, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item *x = static_cast<const Item*>(x_), *gate = static_cast<const Item*>(gate_);
    const Item* weight = static_cast<const Item*>(weight_);
    Item* y = static_cast<Item*>(y_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && tokens * heads * width > SMALL)
    for (long r = 0; r < tokens * heads; r++) {
        const Item *own = x + r * width, *shut = gate + r / heads * gate_stride + r % heads * width;
        Vec squares = {};
        for (long i = 0; i < width; i += LANES) {
            const Vec each = widen_some<KIND>(own + i, width - i);
            squares += each * each;
        }
        const float scale = 1.0f / std::sqrt(total_of(squares) / width + eps);
        for (long i = 0; i < width; i += LANES) {
            const Vec by = widen_some<KIND>(shut + i, width - i), open = is_silu ? by * sigmoid<KIND>(by) : sigmoid<KIND>(by);
            const Vec norm = widen_some<KIND>(own + i, width - i) * scale * widen_some<KIND>(weight + i, width - i);
            narrow_some<KIND>(y + r * width + i, norm * open, width - i);
        }
    }
}

// The first token with the largest logit of each row; a row with a NaN is not finite, and gives that token.
template <Kind KIND>
void best(const void* logits_, long stride, int64_t* tokens, bool* finite, long rows, long size, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item* logits = static_cast<const Item*>(logits_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * size > SMALL)
    for (long r = 0; r < rows; r++) {
        const Item* own = logits + r * stride;
        Vec most = Vec{} - std::numeric_limits<float>::infinity();
        Ints wrong = {};
        const long whole = size / LANES * LANES;
        for (long i = 0; i < whole; i += LANES) {
            const Vec each = Stored<KIND>::widen(own + i);
            most = each > most ? each : most;
            wrong |= each != each;
        }
        float top = most[0];
        bool has_nan = false;
        for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top, has_nan |= wrong[lane] != 0;
        for (long i = whole; i < size; i++) {
            const float each = widen_some<KIND>(own + i, 1)[0];
            top = each > top ? each : top;
            has_nan |= each != each;
        }
        long token = 0;
        for (; token < whole; token += LANES) {
            const Ints equal = Stored<KIND>::widen(own + token) == top;
            int found = 0;
            for (int lane = 0; lane < LANES; lane++) found |= equal[lane];
            if (found) break;
        }
        while (token < size - 1 && !(widen_some<KIND>(own + token, 1)[0] == top)) token++;
        if (has_nan)
            for (token = 0; widen_some<KIND>(own + token, 1)[0] == widen_some<KIND>(own + token, 1)[0];) token++;
        tokens[r] = token;
        finite[r] = !has_nan && std::isfinite(top);
    }
}

// How tokens are drawn, a number for each row. What is null limits no row.
struct Draws {
    const int64_t* best;                // the token of the largest logit
    const int64_t* otherwise;           // the token where none can be drawn
    const int64_t* is_drawn;            // 0 where the row gets that token anyway
    const float *uniform, *sharpness;   // from 0 to 1; 1 / temperature
    const float *min_p, *excess;        // the second is 1 - top_p
    const int64_t* outside;             // how many tokens top_k leaves out
};

// The weights of a row's tokens, e^((logit - best logit) * sharpness), from 0 to 1. They are kept for the next row's.
class Weights {
   public:
    template <Kind KIND>
    void read(const typename Stored<KIND>::Item* logits, long size, float best, float sharpness);

    void keep_largest(long count);
    void keep_share(double excess);
    void keep_from(float least) { least_ = std::max(least_, least); }

    // Returns the first token at which the running sum of the kept weights passes this share of it, or -1 if the weights
    // are not finite.
    long token_at(float share);

   private:
    static constexpr long BLOCK = 64;  // tokens, whose weights are summed in vectors

    void gather(float least);
    double gathered_sum() const;
    float least_gathered(double enough);

    long blocks_;
    float least_;   // smaller weights are not kept
    double mass_;  // the sum of the weights that are kept
    std::vector<float> weights_, sums_, tops_;  // of tokens; the sum and the largest of each block
    std::vector<float> some_;                   // weights that `gather` found
};

template <Kind KIND>
void Weights::read(const typename Stored<KIND>::Item* logits, long size, float best, float sharpness) {
    blocks_ = (size + BLOCK - 1) / BLOCK, least_ = 0.0f, mass_ = 0.0;
    weights_.resize(blocks_ * BLOCK), sums_.resize(blocks_), tops_.resize(blocks_);
    typename Stored<KIND>::Item filled[BLOCK];  // up with logits of tokens that there are not
    for (long block = 0; block < blocks_; block++) {
        const typename Stored<KIND>::Item* own = logits + block * BLOCK;
        const long left = size - block * BLOCK;
        if (left < BLOCK) {
            for (long i = 0; i < BLOCK; i += LANES)
                Stored<KIND>::narrow(filled + i, Vec{} - std::numeric_limits<float>::infinity());
            std::memcpy(filled, own, sizeof(*own) * left);
            own = filled;
        }
        Vec sum = {}, top = {};
#pragma GCC unroll 4
        for (long i = 0; i < BLOCK; i += LANES) {
            const Vec each = exponential<false>((Stored<KIND>::widen(own + i) - best) * sharpness);
            store(&weights_[block * BLOCK + i], each);
            sum += each, top = larger(each, top);
        }
        sums_[block] = total_of(sum), tops_[block] = largest_of(top), mass_ += sums_[block];
    }
}

// Collects the weights of at least `least`, but for zeros.
void Weights::gather(float least) {
    least = std::max(least, std::numeric_limits<float>::denorm_min());
    some_.resize(blocks_ * BLOCK);
    long count = 0;
    for (long block = 0; block < blocks_; block++) {
        if (tops_[block] < least) continue;
        for (long i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
            some_[count] = weights_[i];
            count += weights_[i] >= least;
        }
    }
    some_.resize(count);
}

double Weights::gathered_sum() const {
    double sum = 0.0;
    for (const float each : some_) sum += each;
    return sum;
}

// The largest of the gathered weights that, with all larger ones, sum to `enough`; the least if all do not.
//
// Weights are not negative, so that they rise with their bits. Each round sums weights by ten or eleven bits, and leaves
// those that have the bits of the one that is sought, until they are few.
float Weights::least_gathered(double enough) {
    constexpr size_t FEW = 128;
    constexpr long PLACES = 1 << 11;
    static thread_local double sums[PLACES];
    double above = 0.0;
    if (some_.empty()) return least_;  // no weight is a number
    for (const int shift : {20, 10, 0}) {
        if (some_.size() <= FEW) break;
        const auto place = [shift](float weight) {
            uint32_t bits;
            std::memcpy(&bits, &weight, sizeof bits);
            return bits >> shift & (shift == 20 ? PLACES - 1 : PLACES / 2 - 1);
        };
        std::fill(sums, sums + PLACES, 0.0);
        for (const float each : some_) sums[place(each)] += each;
        long found = -1;
        for (long each = PLACES - 1; each >= 0; each--) {
            if (sums[each] == 0.0) continue;
            if (found >= 0) above += sums[found];
            found = each;
            if (above + sums[each] >= enough) break;
        }
        some_.erase(std::remove_if(some_.begin(), some_.end(), [&](float each) { return place(each) != found; }),
                    some_.end());
    }
    std::sort(some_.begin(), some_.end(), std::greater<float>());
    for (const float each : some_) {
        above += each;
        if (above >= enough) return each;
    }
    return some_.back();
}

// Keeps the `count` largest weights, and all that equal the least of these. Their sum counts `count` weights.
void Weights::keep_largest(long count) {
    const auto least_of = [count](std::vector<float>& all) {  // of the `count` largest
        std::nth_element(all.begin(), all.begin() + count - 1, all.end(), std::greater<float>());
        return all[count - 1];
    };
    some_ = tops_;
    gather(count <= blocks_ ? least_of(some_) : 0.0f);  // at least one of each of so many blocks
    if (count > static_cast<long>(some_.size())) return;  // the others are zeros
    least_ = least_of(some_);
    gather(least_);
    mass_ = gathered_sum() - (static_cast<double>(some_.size()) - count) * least_;
}

// Keeps the largest of the kept weights that sum to all but the share `excess`, and all that equal the least of these.
void Weights::keep_share(double excess) {
    const double enough = mass_ * (1.0 - excess);
    for (const float floor : {0x1p-7f, 0x1p-14f, 0.0f}) {  // most often few weights sum to the share
        gather(std::max(floor, least_));
        if (floor <= least_ || gathered_sum() >= enough) break;
    }
    least_ = least_gathered(enough);
}

long Weights::token_at(float share) {
    double total = 0.0;
    for (long block = 0; block < blocks_; block++) {
        if (least_ > 0.0f) {
            Vec sum = {};
            for (long i = block * BLOCK; tops_[block] >= least_ && i < (block + 1) * BLOCK; i += LANES) {
                const Vec each = load(&weights_[i]);
                sum += each >= least_ ? each : Vec{};
            }
            sums_[block] = total_of(sum);
        }
        total += sums_[block];
    }
    const double target = total * share;
    double before = 0.0;
    long token = -1;
    for (long block = 0; block < blocks_; block++) {
        if (sums_[block] > 0.0f && before + sums_[block] > target) {
            // Single weights, added in another order, may not sum to the target: then it is the block's last token
            for (long i = block * BLOCK; i < (block + 1) * BLOCK && before <= target; i++)
                if (weights_[i] > 0.0f && weights_[i] >= least_) before += weights_[i], token = i;
            break;
        }
        before += sums_[block];
    }
    return token;
}

// Returns false where there is no memory for weights.
template <Kind KIND>
bool draw_each(const void* logits_, long stride, long rows, long size, const Draws& draws, int64_t* tokens,
               int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item* logits = static_cast<const Item*>(logits_);
    bool has_memory = true;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows > 1) reduction(&& : has_memory)
    for (long r = 0; r < rows; r++) {
        static thread_local Weights weights;
        tokens[r] = draws.otherwise[r];
        if (draws.is_drawn && !draws.is_drawn[r]) continue;
        const Item* own = logits + r * stride;
        const float best = widen_some<KIND>(own + draws.best[r], 1)[0];
        if (!std::isfinite(best)) continue;
        try {
            weights.read<KIND>(own, size, best, draws.sharpness[r]);
            const long outside = draws.outside ? draws.outside[r] : 0;
            const float excess = draws.excess ? draws.excess[r] : 0.0f;
            if (outside > 0) weights.keep_largest(size - outside);
            if (excess > 0.0f) weights.keep_share(excess);
            if (draws.min_p) weights.keep_from(draws.min_p[r]);
            const long token = weights.token_at(draws.uniform[r]);
            if (token >= 0) tokens[r] = token;
        } catch (const std::bad_alloc&) {
            has_memory = false;
        }
    }
    return has_memory;
}

}  // namespace

extern "C" {

void norm(const void* x, const void* residual, const void* weight, void* y, void* total, long rows, long width,
          float eps, int kind, int num_threads) {
    auto* of_kind = kind == FLOAT32 ? normed<FLOAT32> : kind == BFLOAT16 ? normed<BFLOAT16> : normed<FLOAT16>;
    of_kind(x, residual, weight, y, total, rows, width, eps, num_threads);
}

void gated_norm(const void* x, const void* gate, const void* weight, void* y, long tokens, long heads, long width,
                long gate_stride, float eps, bool is_silu, int kind, int num_threads) {
    auto* of_kind = kind == FLOAT32    ? gated_normed<FLOAT32>
                    : kind == BFLOAT16 ? gated_normed<BFLOAT16>
                                       : gated_normed<FLOAT16>;
    of_kind(x, gate, weight, y, tokens, heads, width, gate_stride, eps, is_silu, num_threads);
}

void rotate(const void* x, const void* cos, const void* sin, void* y, long rows, long heads, long dim, long row_stride,
            long head_stride, int kind, int num_threads) {
    auto* of_kind = kind == FLOAT32 ? turned<FLOAT32> : kind == BFLOAT16 ? turned<BFLOAT16> : turned<FLOAT16>;
    of_kind(x, cos, sin, y, rows, heads, dim, row_stride, head_stride, num_threads);
}

// y [M, I] = gate(x[:, :I]) * x[:, I:]
void gate(int which, const void* x, void* y, long rows, long width, float slope, float limit, int kind,
          int num_threads) {
    auto* of_kind = kind == FLOAT32 ? gated<FLOAT32> : kind == BFLOAT16 ? gated<BFLOAT16> : gated<FLOAT16>;
    of_kind(static_cast<Gate>(which), x, y, rows, width, slope, limit, num_threads);
}

void curve(int which, const void* x, void* y, long count, int kind, int num_threads) {
    auto* of_kind = kind == FLOAT32 ? curved<FLOAT32> : kind == BFLOAT16 ? curved<BFLOAT16> : curved<FLOAT16>;
    of_kind(static_cast<Curve>(which), x, y, count, num_threads);
}

void score(const void* x, const void* weight, const float* bias, void* y, long rows, long width, long outputs, int kind,
           int num_threads) {
    auto* of_kind = kind == FLOAT32 ? scored<FLOAT32> : kind == BFLOAT16 ? scored<BFLOAT16> : scored<FLOAT16>;
    of_kind(x, weight, bias, y, rows, width, outputs, num_threads);
}

void softmax(const float* x, float* y, long rows, long width) { shared_out(x, y, rows, width); }

void choose(const void* logits, long stride, int64_t* tokens, bool* finite, long rows, long size, int kind,
            int num_threads) {
    auto* of_kind = kind == FLOAT32 ? best<FLOAT32> : kind == BFLOAT16 ? best<BFLOAT16> : best<FLOAT16>;
    of_kind(logits, stride, tokens, finite, rows, size, num_threads);
}

bool draw(const void* logits, long stride, long rows, long size, const Draws* draws, int64_t* tokens, int kind,
          int num_threads) {
    auto* of_kind = kind == FLOAT32 ? draw_each<FLOAT32> : kind == BFLOAT16 ? draw_each<BFLOAT16> : draw_each<FLOAT16>;
    return of_kind(logits, stride, rows, size, *draws, tokens, num_threads);
}
}
