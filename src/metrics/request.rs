use std::time::Duration;

/// When a request came and when its tokens did, on the run's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestTimes {
    /// When it was submitted.
    pub arrival: Duration,
    /// When its first token was there.
    pub first_token: Duration,
    /// When its last token was there.
    pub last_token: Duration,
    /// Tokens generated, at least 1.
    pub n_output: u32,
}

impl RequestTimes {
    /// The times of a request whose tokens came at `tokens`, ascending; nothing if it generated none.
    pub fn from_tokens(arrival: Duration, tokens: &[Duration]) -> Option<Self> {
        let (&first_token, &last_token) = (tokens.first()?, tokens.last()?);
        Some(Self { arrival, first_token, last_token, n_output: tokens.len() as u32 })
    }

    /// Time to first token, in milliseconds.
    pub fn ttft_ms(&self) -> f64 {
        millis(self.first_token.saturating_sub(self.arrival))
    }

    /// Time from submission to the last token, in milliseconds.
    pub fn e2e_ms(&self) -> f64 {
        millis(self.last_token.saturating_sub(self.arrival))
    }

    /// Time per output token after the first, `(e2e - ttft) / (n_output - 1)` in milliseconds; nothing for one token.
    pub fn tpot_ms(&self) -> Option<f64> {
        let decode = self.last_token.saturating_sub(self.first_token);
        (self.n_output > 1).then(|| millis(decode) / f64::from(self.n_output - 1))
    }
}

/// The gaps between tokens that came at `tokens` (inter-token latencies), in milliseconds.
pub(super) fn itl_ms(tokens: &[Duration]) -> impl Iterator<Item = f64> {
    tokens.windows(2).map(|pair| millis(pair[1].saturating_sub(pair[0])))
}

pub(super) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: &[u64]) -> Vec<Duration> {
        ms.iter().copied().map(Duration::from_millis).collect()
    }

    #[test]
    fn latencies_follow_the_tokens() {
        let tokens = at(&[150, 160, 190, 250]);
        let times = RequestTimes::from_tokens(Duration::from_millis(100), &tokens).expect("four tokens");
        let close = |got: f64, want: f64| (got - want).abs() < 1e-9;
        assert!(close(times.ttft_ms(), 50.0) && close(times.e2e_ms(), 150.0));
        assert!(times.tpot_ms().is_some_and(|tpot| close(tpot, 100.0 / 3.0)));
        let gaps: Vec<f64> = itl_ms(&tokens).collect();
        assert!(
            gaps.len() == 3 && gaps.iter().zip([10.0, 30.0, 60.0]).all(|(&got, want)| close(got, want)),
            "{gaps:?}"
        );
    }

    #[test]
    fn one_token_has_no_time_per_output_token() {
        let times = RequestTimes::from_tokens(Duration::ZERO, &at(&[5])).expect("a token");
        assert_eq!(times.tpot_ms(), None);
        assert_eq!(RequestTimes::from_tokens(Duration::ZERO, &[]), None);
    }
}
