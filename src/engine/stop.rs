//! Where a text that comes in pieces is ended by a stop string.
//!
//! Never lets a part of a stop string go, and never ends a request: that is up to who reads it.

/// Holds text back that may become a stop string, until it is one or can not become one.
///
/// A stop string ends the text where it completes first; of several that complete at once, the longest counts. So the
/// result does not depend on how the text was cut into pieces.
///
/// ```
/// use eldr::engine::{Released, StopFilter};
///
/// let mut stop = StopFilter::new(vec!["\n\n".to_owned()]);
/// assert_eq!(stop.push("one\n").text, "one");
/// let Released { text, hit } = stop.push("two\n\nthree");
/// assert_eq!((text.as_str(), hit), ("\ntwo", Some(0)));
/// ```
#[derive(Debug)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

/// What a piece of text let go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    /// Text that can not be part of a stop string.
    pub text: String,
    /// The stop string that ended the text, by its number.
    pub hit: Option<usize>,
}

impl StopFilter {
    /// Stops at any of `stops`, none of them empty.
    pub fn new(stops: Vec<String>) -> Self {
        assert!(stops.iter().all(|stop| !stop.is_empty()), "an empty stop string");
        Self { stops, held: String::new() }
    }

    /// Whether nothing is held back.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Takes more text. After a hit, [`StopFilter::finish`] gives what came behind the stop string.
    pub fn push(&mut self, text: &str) -> Released {
        if self.stops.is_empty() {
            return Released { text: text.to_owned(), hit: None };
        }
        self.held.push_str(text);
        let ends = self.stops.iter().enumerate().filter_map(|(number, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, number))
        });
        if let Some((end, start, number)) = ends.min() {
            let rest = self.held.split_off(end);
            self.held.truncate(start);
            return Released { text: std::mem::replace(&mut self.held, rest), hit: Some(number) };
        }
        let keep = self.held.len() - self.longest_start();
        let rest = self.held.split_off(keep);
        Released { text: std::mem::replace(&mut self.held, rest), hit: None }
    }

    /// The text ended: what was held back is part of it. After a hit, what came behind the stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The length of the longest end of the held text that starts a stop string.
    fn longest_start(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let borders = (from..self.held.len()).filter(|&at| self.held.is_char_boundary(at));
        let starts = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        borders.into_iter().find(starts).map_or(0, |at| self.held.len() - at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn filter(stops: &[&str]) -> StopFilter {
        StopFilter::new(stops.iter().map(|&stop| stop.to_owned()).collect())
    }

    #[test]
    fn the_start_of_a_stop_string_is_never_let_go() {
        let mut stop = filter(&["\n\nUser:"]);
        assert_eq!(stop.push("Hello\n"), Released { text: "Hello".to_owned(), hit: None });
        assert_eq!(stop.push("\nUs"), Released { text: String::new(), hit: None });
        assert_eq!(stop.push("e it"), Released { text: "\n\nUse it".to_owned(), hit: None });
        assert_eq!(stop.push("\n\nUser: me"), Released { text: String::new(), hit: Some(0) });
    }

    #[test]
    fn what_was_held_back_at_the_end_is_text() {
        let mut stop = filter(&["###"]);
        assert_eq!(stop.push("a##").text, "a");
        assert!(!stop.is_empty());
        assert_eq!(stop.finish(), "##");
    }

    /// Char by char, the first stop string that completes, the longest of those that do at once.
    fn reference(stops: &[String], text: &str) -> (String, bool) {
        for (at, c) in text.char_indices() {
            let seen = &text[..at + c.len_utf8()];
            if let Some(stop) = stops.iter().filter(|stop| seen.ends_with(stop.as_str())).max_by_key(|s| s.len()) {
                return (seen[..seen.len() - stop.len()].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn any_cut_gives_what_no_cut_gives(
            stops in prop::collection::vec("[ab\u{e9}]{1,4}", 0..4),
            text in "[ab\u{e9}]{0,24}",
            cuts in any::<u32>(),
        ) {
            let mut stop = StopFilter::new(stops.clone());
            let (mut got, mut hit, mut piece) = (String::new(), false, String::new());
            for (at, c) in text.chars().enumerate() {
                piece.push(c);
                if !hit && cuts >> (at % 32) & 1 == 1 {
                    let released = stop.push(&std::mem::take(&mut piece));
                    got.push_str(&released.text);
                    hit = released.hit.is_some();
                }
            }
            if !hit {
                let released = stop.push(&piece);
                got.push_str(&released.text);
                hit = released.hit.is_some();
            }
            if !hit {
                got.push_str(&stop.finish());
            }
            prop_assert_eq!((got, hit), reference(&stops, &text));
        }
    }
}
