//! What a token costs that is read through the C ABI and through Rust. All are drawn before the clock starts.
#![expect(unsafe_code, reason = "the functions measured are C's")]
#![expect(clippy::unwrap_used, reason = "a bench that can not run has nothing to say")]

#[path = "../capi/world.rs"]
mod world;

use std::{thread, time::Duration};

use divan::{Bencher, counter::ItemsCount};
use eldr::{
    capi::{EventKind, eldr_engine_free, eldr_request_free, eldr_request_next, export_engine},
    engine::{Engine, TokenStream},
    types::{Request, SamplingParams},
};

const N_TOKENS: u32 = 4000;

fn main() {
    divan::main();
}

fn drawn(engine: &Engine) {
    while engine.stats().n_active > 0 {
        thread::sleep(Duration::from_millis(1));
    }
}

#[divan::bench(sample_count = 30, sample_size = 1)]
fn rust(bencher: Bencher) {
    let engine = world::engine();
    let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
    let request =
        Request { prompt: world::PROMPT.to_vec(), max_tokens: N_TOKENS, sampling, domain: None, deadline: None };
    let stream = || {
        let stream = engine.submit(request.clone()).unwrap();
        drawn(&engine);
        stream
    };
    bencher.counter(ItemsCount::new(N_TOKENS)).with_inputs(stream).bench_local_values(|mut stream: TokenStream| {
        while let Some(event) = stream.next() {
            divan::black_box(&event);
        }
    });
}

#[divan::bench(sample_count = 30, sample_size = 1)]
fn c(bencher: Bencher) {
    let engine = world::engine();
    let handle = export_engine(engine.clone());
    let request = || {
        let request = world::submit(handle, &world::params(N_TOKENS)).unwrap();
        drawn(&engine);
        request
    };
    bencher.counter(ItemsCount::new(N_TOKENS)).with_inputs(request).bench_local_values(|request| {
        let mut event = world::empty_event();
        loop {
            // SAFETY: a struct whose size is set.
            let status = unsafe { eldr_request_next(request, -1, &raw mut event) };
            divan::black_box((status, &event));
            if event.kind == EventKind::End {
                break;
            }
        }
        eldr_request_free(request);
    });
    eldr_engine_free(handle);
}
