use std::{collections::BTreeMap, sync::Arc};

use axum::{Json, extract::State};
use serde_json::{Value, json};

use crate::{engine::Resident, signature::ExpertCounts, types::WorkerId};

use super::{
    app::{App, blocking},
    error::ApiError,
};

/// Experts of a layer that an explanation names.
const N_TOP: usize = 4;

/// `GET /v1/eldr/experts`: the experts that each decode worker's batch is expected to read.
pub(super) async fn experts(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let n_workers = app.engine.stats().workers.len();
    let residents = app.engine.residents();
    // A sum over every expert of every sequence.
    blocking(move || Json(heat(n_workers, residents.into_iter().map(|(_, resident)| resident)))).await
}

/// What a prompt picked: of each counted layer the distinct experts, and those picked most with their share of the
/// tokens. Null where nothing was counted.
pub(super) fn of_prompt(counts: Option<&ExpertCounts>) -> Value {
    let Some(counts) = counts.filter(|counts| counts.n_tokens() > 0) else { return Value::Null };
    let layers = counts.layers().iter().map(|&layer| {
        let row = counts.row(layer).unwrap_or_default();
        let mut picked: Vec<(usize, u32)> = row.iter().copied().enumerate().filter(|&(_, n)| n > 0).collect();
        let distinct = picked.len();
        picked.sort_by_key(|&(expert, n)| (std::cmp::Reverse(n), expert));
        picked.truncate(N_TOP);
        let share = |n: u32| hundredths(f64::from(n) / f64::from(counts.n_tokens()));
        let top = picked.iter().map(|&(expert, n)| json!({ "expert": expert, "share": share(n) }));
        json!({ "layer": layer, "distinct": distinct, "top": top.collect::<Vec<_>>() })
    });
    json!({ "tokens": counts.n_tokens(), "of": counts.n_expert(), "layers": layers.collect::<Vec<_>>() })
}

/// A sequence's next token is taken to pick an expert as often as its prompt's tokens did.
fn heat(n_workers: usize, residents: impl Iterator<Item = Resident>) -> Value {
    let mut held: BTreeMap<WorkerId, (usize, Vec<Arc<ExpertCounts>>)> = BTreeMap::new();
    for resident in residents {
        let (n, counted) = held.entry(resident.worker).or_default();
        *n += 1;
        counted.extend(resident.counts.filter(|counts| counts.n_tokens() > 0));
    }
    let first = held.values().find_map(|(_, counted)| counted.first()).cloned();
    let layers = first.as_ref().map_or(&[][..], |counts| counts.layers());
    let workers = (0..n_workers).map(|id| {
        let (n, counted) = held.remove(&WorkerId(id as u32)).unwrap_or_default();
        let rows: Vec<Row> = layers.iter().map(|&layer| Row::of(layer, &counted)).collect();
        json!({
            "id": id, "n_sequences": n, "n_counted": counted.len(),
            "distinct": rows.iter().map(|row| hundredths(row.distinct)).collect::<Vec<_>>(),
            "heat": rows.iter().map(|row| row.heat.iter().copied().map(hundredths).collect()).collect::<Vec<Vec<f64>>>(),
        })
    });
    json!({
        "n_expert": first.as_ref().map_or(0, |counts| counts.n_expert()), "layers": layers,
        "workers": workers.collect::<Vec<_>>(),
    })
}

/// One layer of one worker's batch.
struct Row {
    /// Of each expert, the sequences expected to pick it in a step.
    heat: Vec<f64>,
    /// Distinct experts expected in a step.
    distinct: f64,
}

impl Row {
    fn of(layer: u32, counted: &[Arc<ExpertCounts>]) -> Self {
        let n_expert = counted.first().map_or(0, |counts| counts.n_expert() as usize);
        let (mut heat, mut spared) = (vec![0.0; n_expert], vec![1.0; n_expert]);
        for counts in counted {
            let n_tokens = f64::from(counts.n_tokens());
            let row = counts.row(layer).unwrap_or_default();
            for ((heat, spared), &n) in heat.iter_mut().zip(&mut spared).zip(row) {
                let share = f64::from(n) / n_tokens;
                *heat += share;
                *spared *= 1.0 - share.min(1.0);
            }
        }
        let distinct = spared.iter().map(|spared: &f64| 1.0 - spared).sum();
        Self { heat, distinct }
    }
}

fn hundredths(x: f64) -> f64 {
    (x * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(picks: &[u32]) -> ExpertCounts {
        let mut counts = ExpertCounts::new(&[1], 4);
        counts.add_tokens(picks.len() as u32 / 2);
        counts.add(1, picks);
        counts
    }

    fn resident(worker: u32, picks: Option<&[u32]>) -> Resident {
        let counts = picks.map(|picks| Arc::new(counts(picks)));
        Resident { worker: WorkerId(worker), n_tokens: 9, counts }
    }

    #[test]
    fn heat_adds_up_what_the_prompts_of_a_batch_picked() {
        let all = [resident(1, Some(&[0, 1, 0, 2])), resident(1, Some(&[0, 3])), resident(0, None)];
        let heat = heat(3, all.into_iter());
        assert_eq!((&heat["n_expert"], &heat["layers"]), (&json!(4), &json!([1])));
        let worker = |n: usize| heat["workers"][n].clone();
        assert_eq!(worker(0), json!({"id": 0, "n_sequences": 1, "n_counted": 0, "distinct": [0.0], "heat": [[]]}));
        // Expert 0 is picked by both in every step, 1 and 2 by the first in every other one, 3 by the second.
        let want =
            json!({"id": 1, "n_sequences": 2, "n_counted": 2, "distinct": [3.0], "heat": [[2.0, 0.5, 0.5, 1.0]]});
        assert_eq!(worker(1), want);
        assert_eq!(worker(2)["n_sequences"], 0);
    }

    #[test]
    fn an_explanation_names_the_experts_picked_most() {
        let told = of_prompt(Some(&counts(&[2, 1, 2, 0, 2, 1])));
        let top = json!([{"expert": 2, "share": 1.0}, {"expert": 1, "share": 0.67}, {"expert": 0, "share": 0.33}]);
        assert_eq!(told, json!({"tokens": 3, "of": 4, "layers": [{"layer": 1, "distinct": 3, "top": top}]}));
        assert_eq!(of_prompt(None), Value::Null);
    }
}
