//! Another calibration while requests are under way.
//!
//! Never lets signatures of different layers meet: whoever waits for a slot gets a new one from its counts.

use std::sync::Arc;

use crate::{
    calibrate::Calibration,
    schedule::{Dispatcher, Handoff},
    signature::Signature,
};

/// A prompt's signature, if its experts were counted.
pub(super) fn signature(calibration: &Calibration, handoff: &Handoff) -> Option<Signature> {
    handoff.counts.as_ref().and_then(|counts| calibration.signature(counts))
}

impl Dispatcher {
    /// Makes signatures by another calibration from now on, and compares them with its centroids. `counted` are the layers
    /// that all prefill workers count, and have counted since the first request.
    ///
    /// # Errors
    /// One for another model is refused, and one that compares layers which are not counted: which layers a worker counts is
    /// fixed when it starts.
    pub fn set_calibration(&mut self, calibration: Arc<Calibration>, counted: &[u32]) -> Result<(), String> {
        let Some(old) = &self.calibration else {
            return Err(
                "the workers were started without a calibration, so they count no experts; restart with one".into()
            );
        };
        if old.shape != calibration.shape {
            return Err("the new calibration is for a model of another shape; make one for this model".into());
        }
        if old.layers != calibration.layers && !calibration.layers.iter().all(|layer| counted.contains(layer)) {
            return Err(format!(
                "the new calibration compares layers {:?} and the workers count {counted:?}, which is fixed when they start: \
                 restart to use it, or serve with a policy that counts all layers, such as marginal_cost",
                calibration.layers
            ));
        }
        let centroids = Arc::new(calibration.centroids.clone());
        self.policies.replace_centroids(&centroids).map_err(|error| error.to_string())?;
        for (handoff, waiting) in self.handoffs.iter_mut() {
            *waiting = signature(&calibration, handoff);
        }
        self.calibration = Some(calibration);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ndarray::Array2;

    use super::*;
    use crate::{
        calibrate::TauOrigin,
        route::{LocalityBand, LocalityBandParams},
        schedule::{Command, DispatchLimits, FakeModel, FakeRunner, ModelRunner, PrefillWorker, Source, WorkerEvent},
        types::{FinishReason, MoeShape, Request, RequestId, SamplingParams, Usage, WorkerId},
    };

    const MODEL: FakeModel = FakeModel { n_vocab: 23, n_layer: 3, n_expert: 8, n_expert_used: 2 };

    /// For one worker, whose centroid is the `expert`-th of the first layer.
    fn calibration(layers: &[u32], expert: usize) -> Arc<Calibration> {
        let centroids = Array2::from_shape_fn((1, 8 * layers.len()), |(_, at)| f32::from(u8::from(at == expert)));
        Arc::new(Calibration {
            shape: MoeShape { layers: vec![0, 1, 2], n_layer: 4, n_expert: 8, n_expert_used: 2 },
            fingerprint: "fake".to_owned(),
            idf: Array2::ones((3, 8)),
            layers: layers.to_vec(),
            centroids,
            n_requests: 1,
            n_tokens: 1,
            rho: 0.5,
            tau: 0.1,
            tau_origin: TauOrigin::Default,
            cost: 0.0,
            seed: 1,
            load_model: None,
            capacity: None,
            verdict: None,
        })
    }

    fn dispatcher(calibration: &Arc<Calibration>) -> Dispatcher {
        let centroids = Arc::new(calibration.centroids.clone());
        let policy = LocalityBand::new(centroids, 1, LocalityBandParams::default()).expect("one unit row");
        Dispatcher::new(1, &[1], Box::new(policy), Some(Arc::clone(calibration)), DispatchLimits::default())
    }

    /// Symptom: with other layers, whoever waited for a slot brought a signature of the old ones.
    #[test]
    fn who_waits_for_a_slot_is_compared_by_the_new_layers() {
        let mut dispatcher = dispatcher(&calibration(&[0, 1], 0));
        let mut runner = FakeRunner::new(MODEL, 4, 64, Vec::new());
        let mut worker = PrefillWorker::new(runner.info(), 16, 4, &[], MODEL.n_expert);
        let mut commands = Vec::new();
        for id in 0..2 {
            let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
            let (prompt, max_tokens) = (vec![3, 5, 7, 11, 4], 4);
            let request = Request { prompt, max_tokens, sampling, domain: None, deadline: None };
            dispatcher.submit(RequestId(id), Arc::new(request), Duration::ZERO, &mut commands).expect("room");
        }
        let (mut counts, mut placed) = (None, Vec::new());
        while placed.len() < 2 {
            for command in std::mem::take(&mut commands) {
                match command {
                    Command::Prefill(_, job) => worker.admit(job),
                    Command::Decode(_, handoff, decision) => placed.push((handoff.job.id, decision)),
                    Command::End(..) => {}
                    other => panic!("{other:?}"),
                }
            }
            let mut events = Vec::new();
            worker.step(&mut runner, &mut events);
            for event in events {
                if let WorkerEvent::Prefilled(handoff) = &event {
                    counts.clone_from(&handoff.counts);
                }
                dispatcher.on_event(Source::Prefill(WorkerId(0)), event, &mut commands);
            }
            if worker.is_idle() && placed.len() == 1 && commands.is_empty() {
                dispatcher.set_calibration(calibration(&[2], 6), &[0, 1, 2]).expect("layers that are counted");
                let (id, reason) = (placed[0].0, FinishReason::Length);
                let event = WorkerEvent::Finished { id, reason, usage: Usage::default() };
                dispatcher.on_event(Source::Decode(WorkerId(0)), event, &mut commands);
            }
        }
        let counts = counts.expect("counted");
        let cosine = |layers: &[u32], expert| {
            let signature = calibration(layers, expert).signature(&counts).expect("picks");
            Some(signature.as_slice()[expert])
        };
        assert_eq!([placed[0].1.similarity, placed[1].1.similarity], [cosine(&[0, 1], 0), cosine(&[2], 6)]);
        assert_ne!(placed[0].1.similarity, placed[1].1.similarity);
    }

    #[test]
    fn layers_that_are_not_counted_and_other_models_are_refused_and_nothing_changes() {
        let mut dispatcher = dispatcher(&calibration(&[0, 1], 0));
        let mut refusal = |calibration| dispatcher.set_calibration(calibration, &[0, 1]).expect_err("refused");
        let why = refusal(calibration(&[1, 2], 0));
        assert!(why.contains("compares layers [1, 2] and the workers count [0, 1], which is fixed"), "{why}");
        let mut other = Arc::unwrap_or_clone(calibration(&[0], 0));
        other.shape.n_expert = 16;
        assert!(refusal(Arc::new(other)).contains("a model of another shape"));
        let mut crooked = Arc::unwrap_or_clone(calibration(&[1], 0));
        crooked.centroids.fill(0.5);
        refusal(Arc::new(crooked));
        assert_eq!(dispatcher.calibration.as_ref().map(|old| old.layers.clone()), Some(vec![0, 1]));
        dispatcher.set_calibration(calibration(&[1], 3), &[0, 1]).expect("one of the layers counted");
    }
}
