//! How likely a token is by a row of logits.
//!
//! Never looks at how it was drawn.

use crate::types::{Token, TokenLogprobs};

/// The log probability of `token` by `softmax(logits)`, and the `n` likeliest tokens with theirs.
pub(super) fn of(logits: &[f32], token: Token, n: usize) -> TokenLogprobs {
    let numbers = || logits.iter().copied().filter(|logit| !logit.is_nan());
    let top = f64::from(numbers().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = numbers().map(|logit| (f64::from(logit) - top).exp()).sum();
    let logprob = |logit: f32| (f64::from(logit) - top - sum.ln()) as f32;
    let mut ids: Vec<usize> = (0..logits.len()).filter(|&id| !logits[id].is_nan()).collect();
    let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    if n < ids.len() {
        ids.select_nth_unstable_by(n, likelier);
        ids.truncate(n);
    }
    ids.sort_unstable_by(likelier);
    let top = ids.into_iter().map(|id| (Token::try_from(id).unwrap_or(Token::MAX), logprob(logits[id])));
    TokenLogprobs { logprob: logprob(logits[token as usize]), top: top.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_the_softmax() {
        let logits = [2.0f32.ln(), f32::NAN, 5.0f32.ln(), 3.0f32.ln(), f32::NEG_INFINITY];
        let close = |got: f32, want: f32| (got - want.ln()).abs() < 1e-6;
        let got = of(&logits, 0, 2);
        assert!(close(got.logprob, 0.2), "{got:?}");
        assert!(got.top.len() == 2 && got.top[0].0 == 2 && got.top[1].0 == 3, "{got:?}");
        assert!(close(got.top[0].1, 0.5) && close(got.top[1].1, 0.3), "{got:?}");
        assert_eq!(of(&logits, 3, 0).top, []);
        assert_eq!(of(&logits, 3, 9).top.len(), 4);
        assert_eq!(of(&[1.0, 1.0, 1.0], 0, 2).top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1]);
    }
}
