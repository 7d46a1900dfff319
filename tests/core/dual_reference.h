// The derivatives of random problems, computed by the dual-number reference.
#ifndef GNOMON_TESTS_CORE_DUAL_REFERENCE_H_
#define GNOMON_TESTS_CORE_DUAL_REFERENCE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/derivatives.h"

namespace gnomon::testing {

// A problem, and the direction of the derivative, stored as a second problem of the same shape.
template <class T>
struct Directed {
  Problem<T> at;
  Problem<T> along;
};

template <class T>
std::vector<Dual> Duals(const std::vector<T>& values, const std::vector<T>& tangents) {
  std::vector<Dual> duals;
  for (size_t n = 0; n < values.size(); ++n) duals.emplace_back(values[n], tangents[n]);
  return duals;
}

// Returns all results ("o", "d_x", ...) and their tangents ("o'", "d_x'", ...), without gaps
// between rows. The masks are those of p.at.
template <class T>
Results<double> RunReference(const Directed<T>& p) {
  std::deque<std::vector<Dual>> kept;
  const auto keep = [&](std::vector<Dual> duals) { return kept.emplace_back(duals).data(); };
  const auto strides = [](const Array<T>& array) {
    const auto [batch, heads, rows, columns] = array.size();
    return std::array<int64_t, 3>{heads * rows * columns, rows * columns, columns};
  };
  const auto rows = [&](const Array<T>& values, const Array<T>& tangents) {
    return View<const Dual>{keep(Duals(values.Elements(), tangents.Elements())), strides(values)};
  };
  const auto numbers = [&](const std::vector<T>& values, const std::vector<T>& tangents) {
    return keep(Duals(values, tangents));
  };
  const ProblemOptions& options = p.at.options;
  const AttentionInput<T> at = p.at.Input();
  AttentionInput<Dual> in;
  in.shape = at.shape;
  in.mask = at.mask;
  in.dropout = at.dropout;
  in.softcap = at.softcap;
  in.query_offset = at.query_offset;
  in.query_offsets = at.query_offsets;
  in.query_positions = at.query_positions;
  in.key_positions = at.key_positions;
  in.x = rows(p.at.x, p.along.x);
  in.y = rows(p.at.y, p.along.y);
  in.v = rows(p.at.v, p.along.v);
  in.row_scalars = numbers(p.at.row, p.along.row);
  in.column_scalars = numbers(p.at.column, p.along.column);
  in.head_scalars = numbers(p.at.head, p.along.head);
  in.factor = numbers(p.at.factor, p.along.factor);
  if (at.bias.table != nullptr) {
    in.bias = {numbers(p.at.bias, p.along.bias), at.bias.batch_stride, at.bias.layout};
  }
  if (at.key_bias != nullptr) in.key_bias = numbers(p.at.key_bias, p.along.key_bias);
  const auto constant = [&](const std::vector<T>& values) {
    return numbers(values, std::vector<T>(values.size()));
  };
  if (at.key_bias_low != nullptr) {
    in.key_bias_low = constant(p.at.key_bias_low);
    in.key_bias_base = constant(p.at.key_bias_base);
  }
  if (at.temperature != nullptr) in.temperature = numbers(p.at.temperature, p.along.temperature);
  if (options.pair_bias.exists) {
    in.pair_bias = Problem<T>::PairView(rows(p.at.pair_bias, p.along.pair_bias), options.pair_bias);
  }
  if (at.relative.layout != nullptr) {
    in.relative.layout = at.relative.layout;
    in.relative.factor = static_cast<double>(at.relative.factor);
    if (at.relative.keys != nullptr) {
      in.relative.query = rows(p.at.relative_query, p.along.relative_query);
      in.relative.dim = at.relative.dim;
      in.relative.keys = numbers(p.at.relative_keys, p.along.relative_keys);
      in.relative.key_heads = at.relative.key_heads;
    }
    if (at.relative.values != nullptr) {
      in.relative.values = numbers(p.at.relative_values, p.along.relative_values);
      in.relative.value_heads = at.relative.value_heads;
    }
    if (at.relative.queries != nullptr) {
      in.relative.key = rows(p.at.relative_key, p.along.relative_key);
      in.relative.key_dim = at.relative.key_dim;
      in.relative.queries = numbers(p.at.relative_queries, p.along.relative_queries);
      in.relative.query_heads = at.relative.query_heads;
    }
  }

  std::map<std::string, std::vector<Dual>> results;
  const auto result = [&](const std::string& name, size_t size) {
    return (results[name] = std::vector<Dual>(size)).data();
  };
  const auto view = [&](const std::string& name, const Array<T>& like) {
    return View<Dual>{result(name, like.Elements().size()), strides(like)};
  };
  const size_t lines = p.at.d_lse.size();
  const AttentionOutput<Dual> out{view("o", p.at.d_o), result("lse", lines),
                                  result("statistics", 3 * lines)};
  AttentionForward(p.at.function, in, out);
  const AttentionBackwardInput<Dual> saved{{out.o.data, out.o.stride},
                                           out.lse,
                                           rows(p.at.d_o, p.along.d_o),
                                           numbers(p.at.d_lse, p.along.d_lse),
                                           out.statistics};
  AttentionGradient<Dual> gradient;
  gradient.x = view("d_x", p.at.x);
  gradient.y = view("d_y", p.at.y);
  gradient.v = view("d_v", p.at.v);
  gradient.row_scalars = result("d_row", p.at.row.size());
  gradient.column_scalars = result("d_column", p.at.column.size());
  gradient.head_scalars = result("d_head", p.at.head.size());
  gradient.factor = result("d_factor", p.at.factor.size());
  if (at.bias.table != nullptr) {
    gradient.bias = {result("d_bias", p.at.bias.size()), at.bias.batch_stride, at.bias.layout};
  }
  if (at.key_bias != nullptr) gradient.key_bias = result("d_key_bias", p.at.key_bias.size());
  if (at.temperature != nullptr) {
    gradient.temperature = result("d_temperature", p.at.temperature.size());
  }
  if (options.pair_bias.exists) {
    gradient.pair_bias =
        Problem<T>::PairView(view("d_pair_bias", p.at.pair_bias), options.pair_bias);
  }
  if (at.relative.keys != nullptr) {
    gradient.relative_query = view("d_relative_query", p.at.relative_query);
    gradient.relative_keys = result("d_relative_keys", p.at.relative_keys.size());
  }
  if (at.relative.values != nullptr) {
    gradient.relative_values = result("d_relative_values", p.at.relative_values.size());
  }
  if (at.relative.queries != nullptr) {
    gradient.relative_key = view("d_relative_key", p.at.relative_key);
    gradient.relative_queries = result("d_relative_queries", p.at.relative_queries.size());
  }
  AttentionBackward(p.at.function, in, saved, gradient);

  Results<double> all;
  for (const auto& [name, duals] : results) {
    const auto push = [&, duals = duals](const std::string& to, double Dual::* part) {
      all[to] = {};
      for (const Dual& dual : duals) all[to].push_back(dual.*part);
    };
    push(name, &Dual::value);
    if (name != "statistics") push(name + "'", &Dual::tangent);
  }
  return all;
}

}  // namespace gnomon::testing

#endif  // GNOMON_TESTS_CORE_DUAL_REFERENCE_H_
