/* Attention from C: the operator of gnomon/attention.h on contiguous float arrays, row-major. Zero
 * a structure before use; a null pointer means that there is no such array. The functions return
 * GNOMON_OK or what went wrong, and write nothing if an argument is invalid. */
#ifndef GNOMON_GNOMON_H_
#define GNOMON_GNOMON_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* s_ij = factor_h f(x_i . y_j or |x_i - y_j|^2; scalars) + bias_h(j - i), o_i = softmax_j(s_ij)
 * v_j. heads is a multiple of key_heads; f and how many scalars it reads, R, C and S, are those of
 * the pair function of that name: "dot", "laplacian", ... */
typedef struct gnomon_attention {
  const char* function;
  int64_t batch, heads, key_heads, queries, keys, dim, value_dim;
  const float* x;              /* (batch, heads, queries, dim) */
  const float* y;              /* (batch, key_heads, keys, dim) */
  const float* v;              /* (batch, key_heads, keys, value_dim) */
  const float* row_scalars;    /* (R, batch, heads, queries) */
  const float* column_scalars; /* (C, batch, key_heads, keys) */
  const float* head_scalars;   /* (S, heads) */
  const float* factor;         /* (heads): 1 / sqrt(dim), -gamma, ... */
  const float* bias;           /* (heads, queries + keys - 1) or null: entry j - i + queries - 1 */
  int causal;                  /* not 0: query i sees the keys j <= i + query_offset */
  int64_t query_offset;
  int threads; /* at most this many; 0 is 1 */
  /* (3, batch, heads, queries) or null: what the forward function keeps of each row for the
   * backward function (AttentionOutput of gnomon/attention.h), which computes the forward pass
   * again if it is null. */
  float* statistics;
  /* How much may be left out of a row's sum of weights (AttentionInput of gnomon/attention.h), at
   * least 0 and below 1; 0: nothing. */
  double tolerance;
} gnomon_attention;

/* Gradients, each in the shape of what it belongs to; null: not computed. */
typedef struct gnomon_attention_gradient {
  float *x, *y, *v, *row_scalars, *column_scalars, *head_scalars, *factor, *bias;
} gnomon_attention_gradient;

enum { GNOMON_OK = 0, GNOMON_INVALID_ARGUMENT = 1, GNOMON_FAILURE = 2 };

/* Writes o (batch, heads, queries, value_dim) and lse (batch, heads, queries), the logarithm of
 * sum_j exp(s_ij). A row that sees no key gives o = 0 and lse = -inf. */
int gnomon_attention_forward(const gnomon_attention* input, float* o, float* lse);

/* From o and lse as the forward function wrote them, and d_o in the shape of o. */
int gnomon_attention_backward(const gnomon_attention* input, const float* o, const float* lse,
                              const float* d_o, const gnomon_attention_gradient* gradient);

/* What went wrong in the latest call of this thread, "" if nothing; valid until its next call. */
const char* gnomon_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* GNOMON_GNOMON_H_ */
