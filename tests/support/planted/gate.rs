//! Which experts a token picks, computed from planted scores by the published rules of each gate.

use eldr::rng::Rng;

use super::vocab::N_VOCAB;

/// Scores are planted so that no decision is nearer than this, whatever the scratch dimensions do to the norm.
const MARGIN: f64 = 0.01;
/// Relative changes of a token's scores that must not change its picks.
const SCALES: [f64; 3] = [0.97, 1.0, 1.03];

/// How a gate turns a token's scores into picks.
#[derive(Debug, Clone, Default)]
pub struct Rule {
    pub n_expert: usize,
    pub n_used: usize,
    /// Added to the scores (gpt-oss).
    pub score_bias: Option<Vec<f64>>,
    /// Scores go through a sigmoid. Without, they go through a softmax or nothing, which keep their order.
    pub sigmoid: bool,
    /// Added after the sigmoid, for the choice only (`DeepSeek`).
    pub choice_bias: Option<Vec<f64>>,
    /// Groups of neighbouring experts, and how many groups are used: those with the highest sum of their two best.
    pub groups: Option<(usize, usize)>,
}

/// A planted gate: the scores of every token, and what it picks by them.
#[derive(Debug, Clone)]
pub struct Gate {
    /// By token, then expert.
    pub scores: Vec<Vec<f64>>,
    /// By token: experts, ascending.
    pub picks: Vec<Vec<u32>>,
    /// By token, then expert: the scores with their bias, which the choice is made from.
    pub logits: Vec<Vec<f64>>,
}

impl Rule {
    /// Draws scores in [-2, 2] for every token until its picks are clear.
    pub fn plant(&self, rng: &mut Rng) -> Gate {
        let (mut scores, mut picks) = (Vec::new(), Vec::new());
        let mut n_differ = 0;
        while scores.len() < N_VOCAB {
            let row: Vec<f64> = (0..self.n_expert).map(|_| 4.0 * rng.uniform() - 2.0).collect();
            let Some(chosen) = self.clear_picks(&row) else { continue };
            n_differ += usize::from(chosen != top(&row, self.n_used).0);
            scores.push(row);
            picks.push(chosen);
        }
        // A bias or a group that changed no pick would not be tested.
        let plain = self.score_bias.is_none() && self.choice_bias.is_none() && self.groups.is_none();
        assert!(
            if plain { n_differ == 0 } else { n_differ * 4 > N_VOCAB },
            "{n_differ} tokens differ from plain top-k"
        );
        let logits = scores.iter().map(|scores| self.logits(scores)).collect();
        Gate { scores, picks, logits }
    }

    fn logits(&self, scores: &[f64]) -> Vec<f64> {
        let mut logits = scores.to_vec();
        add(&mut logits, self.score_bias.as_ref());
        logits
    }

    fn clear_picks(&self, scores: &[f64]) -> Option<Vec<u32>> {
        let all = SCALES.map(|scale| self.pick(&scores.iter().map(|s| s * scale).collect::<Vec<_>>()));
        let clear = all.iter().all(|(picks, margin)| *picks == all[0].0 && *margin >= MARGIN);
        clear.then(|| all[0].0.clone())
    }

    /// The experts picked, ascending, and the smallest difference that decided it.
    fn pick(&self, scores: &[f64]) -> (Vec<u32>, f64) {
        let mut choice = self.logits(scores);
        if self.sigmoid {
            choice = choice.iter().map(|score| 1.0 / (1.0 + (-score).exp())).collect();
        }
        add(&mut choice, self.choice_bias.as_ref());
        let mut margin = f64::INFINITY;
        if let Some((n_groups, n_groups_used)) = self.groups {
            let len = self.n_expert / n_groups;
            let sums: Vec<f64> = choice.chunks(len).map(sum_of_best_two).collect();
            let (used, group_margin) = top(&sums, n_groups_used);
            margin = group_margin;
            for (expert, score) in choice.iter_mut().enumerate() {
                if !used.contains(&((expert / len) as u32)) {
                    *score = f64::NEG_INFINITY;
                }
            }
        }
        let (picks, pick_margin) = top(&choice, self.n_used);
        (picks, margin.min(pick_margin))
    }
}

fn add(scores: &mut [f64], bias: Option<&Vec<f64>>) {
    for (score, bias) in scores.iter_mut().zip(bias.into_iter().flatten()) {
        *score += bias;
    }
}

fn sum_of_best_two(scores: &[f64]) -> f64 {
    let mut sorted = scores.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted[0] + sorted[1]
}

/// The `n` highest, ascending by place, and by how much the last of them beats the next.
fn top(scores: &[f64], n: usize) -> (Vec<u32>, f64) {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
    let margin = scores[order[n - 1] as usize] - scores[order[n] as usize];
    order.truncate(n);
    order.sort_unstable();
    (order, margin)
}
