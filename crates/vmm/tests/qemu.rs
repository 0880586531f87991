//! The QEMU driver with real VMs: the scenarios of all drivers, each with a guest of its own.

mod support;

use support::{Bench, Kind, scenarios};

macro_rules! with_qemu {
    ($($scenario:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $scenario() {
            let Some(bench) = Bench::new(Kind::Qemu, stringify!($scenario)) else { return };
            bench.template().await;
            scenarios::$scenario(&bench).await;
        }
    )*};
}

with_qemu! {
    two_sandboxes_continue_one_memory_each_for_itself
    a_vm_outlives_its_driver_and_is_adopted
    a_silent_vmm_costs_a_bounded_wait_and_is_ended
    each_end_of_a_guest_has_its_reason
    a_flooding_guest_stays_bounded_and_a_lost_connection_is_replaced
    what_a_restore_costs
}
