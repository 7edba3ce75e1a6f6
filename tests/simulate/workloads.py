"""Random workloads of the simulator, for tests of properties."""

from hypothesis import strategies as st

from diloco.simulate.utilisation import Workload

workloads = st.integers(2, 8).flatmap(
  lambda layers: st.integers(2, 12).flatmap(
    lambda h: st.builds(
      Workload,
      params_per_layer=st.lists(
        st.floats(1e5, 1e8), min_size=layers, max_size=layers
      ).map(tuple),
      step_time=st.floats(1e-3, 10),
      method=st.sampled_from(["data_parallel", "diloco", "streaming"]),
      sync_every=st.just(h),
      fragment_size=st.integers(1, layers),
      pattern=st.sampled_from(["strided", "sequential"]),
      tau=st.integers(0, h - 1),
      bits=st.sampled_from([4, 16, 32]),
      latency=st.sampled_from([0.0, 1e-3, 0.1]),
      link=st.sampled_from(["ideal", "gloo"]),
    )
  )
)
