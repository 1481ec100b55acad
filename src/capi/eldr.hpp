// eldr in C++17: handles that free themselves, statuses as exceptions. Header only; link the C library.
//
// Never holds what eldr.h lends: text is copied. With ELDR_NO_EXCEPTIONS a call that fails returns an empty object or
// false, and eldr::last_error() says why.
#ifndef ELDR_HPP
#define ELDR_HPP

#include "eldr.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#if defined(__cpp_lib_span) || __cplusplus >= 202002L
#include <span>
#endif
#ifndef ELDR_NO_EXCEPTIONS
#include <stdexcept>
#endif

namespace eldr {

// What was wrong in this thread's last call that failed.
inline std::string last_error() { return eldr_last_error(); }
// The library's version.
inline std::string_view version() { return eldr_version(); }
// Whether the library has llama.cpp in it.
inline bool has_engine() { return eldr_has_engine(); }

#ifndef ELDR_NO_EXCEPTIONS
// A status from 100 on, and eldr's sentence about it.
class error : public std::runtime_error {
public:
  explicit error(eldr_status status) : std::runtime_error(eldr_last_error()), status_(status) {}
  eldr_status status() const noexcept { return status_; }

private:
  eldr_status status_;
};
#endif

// Whether the status is OK; one from 100 on is thrown where exceptions are.
inline bool check(eldr_status status) {
#ifndef ELDR_NO_EXCEPTIONS
  if (status >= 100) throw error(status);
#endif
  return status == ELDR_STATUS_OK;
}

#if defined(__cpp_lib_span) || __cplusplus >= 202002L
template <class T> using view = std::span<const T>;
#else
// The part of std::span that is needed, before C++20.
template <class T> class view {
public:
  view(const T *data, std::size_t size) : data_(data), size_(size) {}
  view(const std::vector<T> &values) : data_(values.data()), size_(values.size()) {}
  const T *data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

private:
  const T *data_;
  std::size_t size_;
};
#endif

// A handle and what frees it; moves, and does not copy.
template <class Handle, eldr_status (*Free)(Handle *)> class owned {
public:
  owned() noexcept = default;
  explicit owned(Handle *handle) noexcept : handle_(handle) {}
  owned(owned &&other) noexcept : handle_(other.release()) {}
  owned &operator=(owned &&other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  owned(const owned &) = delete;
  owned &operator=(const owned &) = delete;
  ~owned() { reset(); }

  Handle *get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != nullptr; }
  Handle *release() noexcept { return std::exchange(handle_, nullptr); }
  void reset(Handle *handle = nullptr) noexcept { Free(std::exchange(handle_, handle)); }

protected:
  Handle *handle_ = nullptr;
};

// A filled-in struct of eldr.h.
template <class Params, eldr_status (*Defaults)(Params *, std::size_t)> Params defaults() {
  Params params = {};
  // An older library does not know this struct: what it is passed to refuses it then, its size being 0.
  check(Defaults(&params, sizeof params));
  return params;
}
inline eldr_engine_params engine_params() { return defaults<eldr_engine_params, eldr_engine_default_params>(); }
inline eldr_request_params request_params() { return defaults<eldr_request_params, eldr_request_default_params>(); }
inline eldr_router_params router_params() { return defaults<eldr_router_params, eldr_router_default_params>(); }
inline eldr_model_shape model_shape() { return defaults<eldr_model_shape, eldr_model_shape_init>(); }
inline eldr_route_request route_request() { return defaults<eldr_route_request, eldr_route_request_init>(); }
inline eldr_tap_params tap_params() { return defaults<eldr_tap_params, eldr_tap_default_params>(); }

class calibration : public owned<eldr_calibration, eldr_calibration_free> {
public:
  calibration() noexcept = default;
  explicit calibration(const std::string &path) { check(eldr_calibration_open(path.c_str(), &handle_)); }
  // What is known of a model that was never calibrated.
  explicit calibration(const eldr_model_shape &shape) { check(eldr_calibration_of_shape(&shape, &handle_)); }

  // The same, for counts of every layer that a prompt shows, as `marginal_cost` wants them.
  calibration widened() const {
    calibration wide;
    check(eldr_calibration_widen(handle_, &wide.handle_));
    return wide;
  }

  eldr_calibration_facts facts() const {
    eldr_calibration_facts facts = {};
    facts.size = sizeof facts;
    check(eldr_calibration_get_facts(handle_, &facts));
    return facts;
  }

  // llama.cpp's numbers of the layers whose picks are wanted.
  std::vector<std::uint32_t> layers() const {
    std::vector<std::uint32_t> layers(facts().n_layer_used);
    check(eldr_calibration_get_layers(handle_, layers.data(), layers.size(), nullptr));
    return layers;
  }
};

class tap : public owned<eldr_tap, eldr_tap_free> {
public:
  tap() noexcept = default;
  explicit tap(const eldr_tap_params &params) { check(eldr_tap_open(&params, &handle_)); }
  bool begin() { return check(eldr_tap_begin(handle_)); }
  bool end(std::size_t n_tokens) { return check(eldr_tap_end(handle_, n_tokens)); }
};

class counts : public owned<eldr_counts, eldr_counts_free> {
public:
  counts() noexcept = default;
  explicit counts(const calibration &of) { check(eldr_counts_open(of.get(), &handle_)); }
  bool add(std::uint32_t layer, const std::int32_t *experts, std::size_t n_tokens) {
    return check(eldr_counts_add(handle_, layer, experts, n_tokens));
  }
  bool add(const tap &tap, std::size_t first, std::size_t n_tokens) {
    return check(eldr_counts_add_tap(handle_, tap.get(), first, n_tokens));
  }
  std::vector<std::uint32_t> row(std::uint32_t layer, std::size_t n_expert) const {
    std::vector<std::uint32_t> row(n_expert);
    check(eldr_counts_get_row(handle_, layer, row.data(), row.size(), nullptr));
    return row;
  }
};

// Empty, without an error, for counts that weigh nothing.
class signature : public owned<eldr_signature, eldr_signature_free> {
public:
  signature() noexcept = default;
  explicit signature(const counts &of) { check(eldr_signature_open(of.get(), &handle_)); }
  std::vector<float> values() const {
    std::size_t n = 0;
    eldr_signature_get_values(handle_, nullptr, 0, &n);
    std::vector<float> values(n);
    check(eldr_signature_get_values(handle_, values.data(), n, nullptr));
    return values;
  }
};

class cache : public owned<eldr_cache, eldr_cache_free> {
public:
  cache() noexcept = default;
  explicit cache(const calibration &of) { check(eldr_cache_open(of.get(), &handle_)); }
  bool add(std::int32_t seq, std::int32_t pos, const tap &tap, std::size_t first, std::size_t n_tokens) {
    return check(eldr_cache_add_tap(handle_, seq, pos, tap.get(), first, n_tokens));
  }
  bool seq_rm(std::int32_t seq, std::int32_t p0, std::int32_t p1) {
    return check(eldr_cache_seq_rm(handle_, seq, p0, p1));
  }
  bool seq_cp(std::int32_t from, std::int32_t to, std::int32_t p0, std::int32_t p1) {
    return check(eldr_cache_seq_cp(handle_, from, to, p0, p1));
  }
  // Adds what is known of the positions to `counts`; of how many tokens that is.
  std::uint32_t counts_of(std::int32_t seq, std::int32_t p0, std::int32_t p1, counts &counts) const {
    std::uint32_t n = 0;
    check(eldr_cache_get_counts(handle_, seq, p0, p1, counts.get(), &n));
    return n;
  }
};

class router : public owned<eldr_router, eldr_router_free> {
public:
  router() noexcept = default;
  explicit router(const eldr_router_params &params) { check(eldr_router_open(&params, &handle_)); }

  // OK, FULL or NO_WORKER; `decision` is filled for OK. An empty signature goes by load.
  eldr_status route(const signature &signature, eldr_decision &decision, bool book = true,
                    const char *domain = nullptr) {
    decision = {};
    decision.size = sizeof decision;
    const eldr_status status = eldr_router_route(handle_, signature.get(), domain, book, &decision);
    check(status);
    return status;
  }
  // The same, for a request that the router is to know by its number until it leaves.
  eldr_status route(const eldr_route_request &request, eldr_decision &decision, bool place = true) {
    decision = {};
    decision.size = sizeof decision;
    const eldr_status status = eldr_router_route_request(handle_, &request, place, &decision);
    check(status);
    return status;
  }
  bool leave(std::uint64_t id) { return check(eldr_router_leave(handle_, id)); }
  // A decode step of `n_batch` sequences took `time`, in any one unit.
  bool step(std::uint32_t worker, std::uint32_t n_batch, double time) {
    return check(eldr_router_step(handle_, worker, n_batch, time));
  }
  std::string_view policy() const {
    const char *name = "";
    check(eldr_router_get_policy(handle_, &name));
    return name;
  }
  bool report(std::uint32_t worker, std::uint32_t n_inflight) {
    return check(eldr_router_report(handle_, worker, n_inflight));
  }
  bool unbook(std::uint32_t worker) { return check(eldr_router_unbook(handle_, worker)); }
};

class request : public owned<eldr_request, eldr_request_free> {
public:
  request() noexcept = default;
  explicit request(eldr_request *handle) noexcept : owned(handle) {}

  // OK, WAIT or END; below 0 waits for ever. The event's text stays until this thread's next call that gives out text.
  eldr_status next(eldr_event &event, std::int64_t timeout_ms = -1) {
    event = {};
    event.size = sizeof event;
    const eldr_status status = eldr_request_next(handle_, timeout_ms, &event);
    check(status);
    return status;
  }
  bool cancel() { return check(eldr_request_cancel(handle_)); }
  // Why it went where it went, as far as its events were read.
  std::string explain_json() const {
    const char *json = "";
    check(eldr_request_explain_json(handle_, &json));
    return json;
  }
};

class engine : public owned<eldr_engine, eldr_engine_free> {
public:
  engine() noexcept = default;
  explicit engine(const eldr_engine_params &params) { check(eldr_engine_open(&params, &handle_)); }

  std::vector<std::int32_t> tokenize(std::string_view text) const {
    std::vector<std::int32_t> tokens(text.size() + 8);
    std::size_t n = 0;
    const auto copy = [&] {
      return eldr_engine_tokenize(handle_, text.data(), text.size(), tokens.data(), tokens.size(), &n);
    };
    eldr_status status = copy();
    if (status == ELDR_STATUS_BUFFER) {
      tokens.resize(n);
      status = copy();
    }
    check(status);
    tokens.resize(status == ELDR_STATUS_OK ? n : 0);
    return tokens;
  }

  // Submits `prompt` with the other settings of `params`.
  request submit(view<std::int32_t> prompt, eldr_request_params params = request_params()) {
    params.prompt = prompt.data();
    params.n_prompt = prompt.size();
    eldr_request *handle = nullptr;
    check(eldr_engine_submit(handle_, &params, &handle));
    return request(handle);
  }

  // The whole text; an empty one if it failed and nothing is thrown.
  std::string complete(std::string_view prompt, eldr_request_params params = request_params()) {
    request asked = submit(tokenize(prompt), params);
    std::string text;
    eldr_event event;
    while (asked.next(event) == ELDR_STATUS_OK && event.kind != ELDR_EVENT_KIND_FAILED) {
      text.append(event.text, event.n_text);
    }
    return text;
  }

  // The bytes of a token's text.
  std::string token_text(std::int32_t token) const {
    std::size_t n = 0;
    eldr_engine_token_text(handle_, token, nullptr, 0, &n);
    std::string text(n, ' ');
    check(eldr_engine_token_text(handle_, token, reinterpret_cast<std::uint8_t *>(&text[0]), n, nullptr));
    return text;
  }

  std::string stats_json() const {
    const char *json = "";
    check(eldr_engine_stats_json(handle_, &json));
    return json;
  }
  // Whether all requests ended in time.
  bool drain(std::uint32_t timeout_ms) { return check(eldr_engine_drain(handle_, timeout_ms)); }
};

} // namespace eldr

#endif
