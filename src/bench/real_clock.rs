use std::{sync::Arc, thread, time::Instant};

use crossbeam::channel::bounded;
use parking_lot::Mutex;

use crate::{
    bench::{BenchError, BenchRequest, Probe, Timeline},
    engine::{Engine, EngineError, StreamEvent},
    types::{FinishReason, RequestId},
};

/// One run on the wall clock: the engine as it serves, a client thread a request, at most `concurrency` at once.
///
/// `started` is the moment the probe's and the timeline's clock starts.
pub fn run_real(
    engine: &Engine,
    requests: &[BenchRequest],
    concurrency: Option<usize>,
    probe: &Probe,
    started: Instant,
    progress: &mut dyn FnMut(usize),
) -> Result<Timeline, BenchError> {
    probe.take();
    let timeline = Arc::new(Mutex::new(Timeline::default()));
    let offset = started.elapsed();
    // A place in the system for each request at a time: taken before it arrives, given back when it ends.
    let places = concurrency.map(|n| {
        let (give, take) = bounded(n.max(1));
        // Neither end is dropped before the run is over, so nothing sent here is lost.
        (0..n.max(1)).for_each(|_| give.send(()).expect("both ends are here"));
        (give, take)
    });
    let failed = thread::scope(|scope| {
        let mut clients = Vec::new();
        let mut refused = None;
        for (index, request) in requests.iter().enumerate() {
            let due = offset + request.arrival;
            thread::sleep(due.saturating_sub(started.elapsed()));
            let place = places.as_ref().map(|(_, free)| free.recv());
            let due = if place.is_some() { started.elapsed() } else { due };
            // Ids of the bench, not the engine's, which counts warm-up requests too.
            let id = RequestId(index as u64);
            timeline.lock().arrived(id, &request.name, due);
            let mut stream = match engine.submit((*request.request).clone()) {
                Ok(stream) => stream,
                Err(EngineError::QueueFull(_)) => {
                    timeline.lock().failed(id);
                    if let Some((give, _)) = &places {
                        give.send(()).expect("both ends are here");
                    }
                    continue;
                }
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            };
            let timeline = Arc::clone(&timeline);
            let give_back = places.as_ref().map(|(give, _)| give.clone());
            let skew = engine.started().saturating_duration_since(started);
            clients.push(scope.spawn(move || {
                while let Some(event) = stream.next() {
                    let mut timeline = timeline.lock();
                    match event {
                        StreamEvent::Token { token, at, .. } => timeline.token(id, token, skew + at),
                        StreamEvent::Routed { at, .. } => timeline.admitted(id, skew + at),
                        StreamEvent::End { reason: FinishReason::Stop | FinishReason::Length, .. } => {}
                        StreamEvent::End { .. } | StreamEvent::Failed(_) => timeline.failed(id),
                    }
                }
                if let Some(give_back) = give_back {
                    give_back.send(()).expect("the run waits for its clients");
                }
            }));
            progress(clients.iter().filter(|client| client.is_finished()).count());
        }
        let n_clients = clients.len();
        for (index, client) in clients.into_iter().enumerate() {
            if client.join().is_err() {
                return Some(BenchError::Client);
            }
            progress(index + 1 + requests.len() - n_clients);
        }
        refused.map(BenchError::Engine)
    });
    if let Some(error) = failed {
        return Err(error);
    }
    let mut timeline = std::mem::take(&mut *timeline.lock());
    timeline.saw(probe.take(), None);
    Ok(timeline)
}
