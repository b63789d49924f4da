//! When to look for what is over.

/// When to look through a collection for what is over: when it has doubled since the last time, and not while it is small.
/// So each entry pays for a constant number of looks, and what is over takes no more room than twice what once was not.
pub(super) struct Sweep<const SMALL: usize>(usize);

impl<const SMALL: usize> Sweep<SMALL> {
    pub(super) fn is_due(&self, len: usize) -> bool {
        len >= self.0
    }

    pub(super) fn done(&mut self, left: usize) {
        self.0 = SMALL.max(2 * left);
    }
}

impl<const SMALL: usize> Default for Sweep<SMALL> {
    fn default() -> Self {
        Sweep(SMALL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_is_due_when_there_is_twice_of_what_the_last_one_left() {
        let mut sweep = Sweep::<64>::default();
        assert!(!sweep.is_due(63) && sweep.is_due(64));
        sweep.done(100);
        assert!(!sweep.is_due(199) && sweep.is_due(200));
        sweep.done(3);
        assert!(!sweep.is_due(63) && sweep.is_due(64));
    }
}
