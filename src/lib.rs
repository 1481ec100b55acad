//! Serve mixture-of-experts GGUF models faster with llama.cpp: several decode workers, each request sent to the one
//! whose batch already uses the same experts.
//!
//! A decode step reads the weights of every distinct expert that any sequence of its batch picks, so sequences that
//! pick alike are cheaper together. Which experts a request will pick shows in its prompt, before a decode worker has
//! to be chosen for it.
//!
//! The life of a request:
//!
//! 1. submit: [`Engine::submit`] checks it and gives a [`TokenStream`], or says why not.
//! 2. tokenise: [`Engine::tokenize`] turns text into the prompt's tokens.
//! 3. prefill queue: the [`Dispatcher`](schedule::Dispatcher) gives it to the prefill worker that will be done with it
//!    first: what a worker still holds of a prompt ([`kv`]) does not run again.
//! 4. prefill with tap: the prompt runs chunk by chunk while the tap counts the experts it picks
//!    ([`signature::ExpertCounts`]).
//! 5. signature and route: a [`Calibration`] turns the counts into a unit vector ([`signature::Signature`]); a
//!    [`RoutePolicy`] chooses the decode worker and says why ([`Decision`]).
//! 6. hand-off: keys and values go to that worker, and every position is verified there.
//! 7. decode loop: the worker draws a token of each of its sequences a step.
//! 8. stream out: the client reads tokens and text, blocking or async.
//!
//! The folders, lower floors first: [`types`] and [`rng`] are plain data; [`signature`], [`kv`], [`trace`], [`calibrate`],
//! [`refit`], [`route`], [`schedule`], [`sim`] and [`metrics`] decide, [`figures`] computes what a calibration's report
//! shows, and none of them touches a clock, a thread or a file; `llama` is llama.cpp as safe types; [`engine`] runs threads
//! over both; `server` answers HTTP, `bench` measures, `capi` is the C library. Without the feature `llama` everything but
//! `llama` and the loading of models is there, over any
//! [`ModelRunner`](schedule::ModelRunner).
//!
//! # Versions
//!
//! Semantic versioning, of what a program can be written against. Before 1.0 a new minor number may break it, a new patch
//! number does not; the CHANGELOG says what to change.
//!
//! - Stable in this sense: all that is public and documented here, the names of policies, events and reasons (in code, JSON
//!   and C alike), the command line's options and exit codes, the HTTP routes, and the formats of calibrations, traces and
//!   reports. A file says its format's version; another one is refused in a sentence that says what to do.
//! - Not stable: `bench` and `llama`, which are public for the program and for tests; the words of errors and logs; numbers
//!   that a seed or a default leads to, such as which worker a tie goes to.
//! - Errors and enums marked `non_exhaustive` get new variants in any version, and [`EngineConfig`], [`types::SamplingParams`]
//!   and the other structs with a `Default` get new fields in a minor one: write `..Default::default()`.
//! - The oldest Rust is the `rust-version` of `Cargo.toml`; a minor version may raise it. So may llama.cpp's pinned version,
//!   whose models and numbers are its own.
//! - The C library has a version of its own, `ELDR_ABI_VERSION` and the soname: the head of `eldr.h` says what stays.
//!
//! ```no_run
//! use eldr::{EngineConfig, types::{Request, SamplingParams}};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # #[cfg(feature = "llama")] {
//! // Everything that is wrong with the settings is said at once.
//! let engine = EngineConfig::builder().decode("2@cuda:0,2@cuda:1").policy("auto").open("model.gguf")?;
//! let request = Request {
//!     prompt: engine.tokenize("Once upon a time")?,
//!     max_tokens: 64,
//!     sampling: SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::default() },
//!     domain: None,
//!     deadline: None,
//! };
//! println!("{}", engine.submit(request)?.collect()?.text);
//! # }
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "cli")]
pub mod bench;
pub mod calibrate;
#[cfg(feature = "capi")]
pub mod capi;
pub mod engine;
pub mod figures;
pub mod kv;
#[cfg(feature = "llama")]
pub mod llama;
pub mod metrics;
pub mod refit;
pub mod rng;
pub mod route;
pub mod schedule;
#[cfg(feature = "server")]
pub mod server;
pub mod signature;
pub mod sim;
pub mod trace;
pub mod types;

pub use calibrate::Calibration;
pub use engine::{Engine, EngineBuilder, EngineConfig, EngineError, StreamEvent, TokenStream};
pub use route::{Decision, PolicyKind, RoutePolicy};

/// The README's code compiles.
#[cfg(all(doctest, feature = "llama"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// Who may hold what. An engine is shared by threads and tasks; a stream moves between them and has one reader.
///
/// ```
/// fn shared<T: Clone + Send + Sync + 'static>() {}
/// fn moved<T: Send + 'static>() {}
/// shared::<eldr::Engine>();
/// shared::<eldr::engine::Canceller>();
/// shared::<eldr::EngineConfig>();
/// shared::<std::sync::Arc<eldr::Calibration>>();
/// moved::<eldr::TokenStream>();
/// moved::<Box<dyn eldr::RoutePolicy>>();
/// ```
///
/// Two readers of a stream would tear its text:
/// ```compile_fail,E0599
/// fn twice(stream: eldr::TokenStream) -> (eldr::TokenStream, eldr::TokenStream) {
///     (stream.clone(), stream)
/// }
/// ```
///
/// A turn on the cores is given back once:
/// ```compile_fail,E0599
/// fn twice(permit: eldr::engine::Permit<'_>) {
///     drop(permit.clone());
/// }
/// ```
///
/// A policy has one owner, so it needs no lock and two threads can not ask it at once:
/// ```compile_fail,E0596
/// fn ask(policy: &std::sync::Arc<dyn eldr::RoutePolicy>) {
///     let _ = policy.select(&Default::default(), &[]);
/// }
/// ```
#[cfg(doctest)]
struct Ownership;
