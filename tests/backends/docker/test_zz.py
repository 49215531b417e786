import time, getpass
from tests.backends.docker.test_remote import *
from tests.backends.docker.conftest import *
from tests.conftest import engine
async def test_x(make_engine, engine, ssh_port):
    t=time.perf_counter()
    def lap(w):
        nonlocal t
        n=time.perf_counter(); print(w, round(n-t,2)); t=n
    one = await make_engine(host=f"ssh://{getpass.getuser()}@127.0.0.1:{ssh_port}",opened=False)
    await one._client.open(); lap("copen")
    await one.ping(); lap("ping"); await one.ping(); lap("ping")
    await one._shared.prepare(); lap("prepare")
    r=new_record(); await one.create(r); lap("create"); await one.commit(r.sandbox_id); lap("commit")
    await run_in(one, r.sandbox_id, "true"); lap("run")
    await run_in(one, r.sandbox_id, "true"); lap("run2")
    await one.instances(); lap("instances")
    await one.remove(r.sandbox_id); lap("remove")
    await one.close(); lap("close")
