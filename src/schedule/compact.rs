/// The fewest moves (from, to) that bring the occupied slots into one run of neighbours.
///
/// The run is the window of that length that already holds most of them (ties: the lowest), so sequences stay where
/// they are whenever they can.
pub(super) fn moves(occupied: &[bool]) -> Vec<(usize, usize)> {
    let n = occupied.iter().filter(|&&o| o).count();
    let Some(window) = (0..=occupied.len() - n).max_by_key(|&start| {
        let inside = occupied[start..start + n].iter().filter(|&&o| o).count();
        (inside, std::cmp::Reverse(start))
    }) else {
        return Vec::new();
    };
    let outside = (0..occupied.len()).filter(|i| occupied[*i] && !(window..window + n).contains(i));
    let holes = (window..window + n).filter(|i| !occupied[*i]);
    outside.zip(holes).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_stay_where_they_are() {
        assert!(moves(&[]).is_empty());
        assert!(moves(&[false, false]).is_empty());
        assert!(moves(&[false, true, true, false]).is_empty());
        assert_eq!(moves(&[true, false, true, true]), [(3, 1)]);
        assert_eq!(moves(&[true, true, false, false, true]), [(4, 2)]);
    }

    proptest! {
        #[test]
        fn afterwards_the_occupied_slots_are_neighbours(mut occupied in prop::collection::vec(any::<bool>(), 0..40)) {
            let before = occupied.iter().filter(|&&o| o).count();
            for (from, to) in moves(&occupied) {
                prop_assert!(occupied[from] && !occupied[to]);
                occupied[from] = false;
                occupied[to] = true;
            }
            prop_assert_eq!(occupied.iter().filter(|&&o| o).count(), before);
            let runs = occupied.iter().enumerate().filter(|&(i, &o)| o && (i == 0 || !occupied[i - 1])).count();
            prop_assert!(runs <= 1);
        }
    }
}
