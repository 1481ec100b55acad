//! Which of the known names somebody may have meant.
//!
//! Never decides for them.

/// Names offered at most.
const MOST: usize = 3;

/// The names closest to `name`, by letters to add, drop or change; the closest first. None is further off than a third
/// of what was written.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let far = name.chars().count().div_ceil(3);
    let mut ranked: Vec<(usize, &str)> =
        known.into_iter().map(|known| (distance(name, known), known)).filter(|&(n, _)| n <= far).collect();
    ranked.sort_unstable();
    ranked.dedup();
    ranked.into_iter().take(MOST).map(|(_, known)| known).collect()
}

/// `; close to it are a, b`, or nothing if nothing is.
pub fn close_to<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match nearest(name, known).as_slice() {
        [] => String::new(),
        [one] => format!("; close to it is {one}"),
        names => format!("; close to it are {}", names.join(", ")),
    }
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let change = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_letters_added_dropped_or_changed() {
        for (a, b, n) in [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("slotz", "slots", 1), ("ab", "ba", 2)]
        {
            assert_eq!((distance(a, b), distance(b, a)), (n, n), "{a} {b}");
        }
    }

    #[test]
    fn the_closest_come_first_and_what_is_far_off_not_at_all() {
        let known = ["ctx", "prefill", "rate", "requests", "slots", "seed", "temperature"];
        assert_eq!(nearest("slotz", known), ["slots"]);
        assert_eq!(nearest("rat", known), ["rate"]);
        assert_eq!(close_to("temprature", known), "; close to it is temperature");
        assert_eq!(close_to("xyzzy-plugh", known), "");
    }
}
